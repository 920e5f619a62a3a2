// SPDX-License-Identifier: MIT
#include "lib/device/hand_over.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "lib/base/fp_modes.h"
#include "lib/base/process_end.h"
#include "lib/base/signals.h"
#include "lib/base/trace.h"
#include "lib/tables/lost_tickets.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

// A step's next ticket comes within tens of microseconds. After that, other threads may have better use for the CPU: all
// sessions' device threads share the same few cores. After kSpin the device is busy with other work. The thread then naps
// and checks that the device is still there.
constexpr std::chrono::microseconds kEager(100), kSpin(2000), kNap(50), kBetweenChecks(20'000);
constexpr int kPausesPerLook = 32;

constexpr char kNoSelection[] = "no memory for a refresh of the selections";

void pause_once() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pause(Clock::duration waited) {
  if (waited > kEager) std::this_thread::yield();
  for (int i = 0; i < kPausesPerLook; ++i) pause_once();
}

}  // namespace

Status HandOver::create(const Device& device, const Backend& cpu, int64_t n_tasks, const Counters& counters,
                        std::unique_ptr<HandOver>* hand_over) {
  std::unique_ptr<HandOver> made(new HandOver(device, cpu, n_tasks, counters));
  const SignalsBlocked blocked;
  int error = 0;
  try {
    made->thread_ = std::thread([h = made.get()] {
      h->loop();
      if (h->end_ != nullptr) h->end_(h->end_context_);  // the thread's last action
    });
  } catch (const std::system_error& e) {
    error = e.code().value();
  }
  if (error != 0)
    return fail_system(TANDEM_ERROR_SYSTEM, error, "", "the thread that meets the device could not be started");
  *hand_over = std::move(made);
  return {};
}

void HandOver::stop() {
  drain();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_posted_.notify_all();
  if (thread_.get_id() == std::this_thread::get_id()) return thread_.detach();
  if (thread_.joinable()) thread_.join();
}

void HandOver::retire(void (*end)(void* context), void* context) {
  std::lock_guard lock(mutex_);
  end_ = end;
  end_context_ = context;
  retires_.store(true, std::memory_order_release);
  changed_posted_.notify_all();  // the mutex is held, as otherwise this object may be gone
}

void HandOver::restart(ExchangeFlags* flags) {
  std::lock_guard lock(mutex_);
  if (flags_ != nullptr) {
    flags->ended = flags_->ended;  // the count of steps continues
    if (flags_->bad_index.n_told != flags_->bad_index.n_taken) bad_index_ = flags_->bad_index;
  }
  flags_ = flags;
  learner_.forget_merged();
  restart_locked();
}

void HandOver::start_over() {
  std::lock_guard lock(mutex_);
  for (uint64_t* count : {&flags_->arrived, &flags_->answered, &flags_->observed}) std::atomic_ref(*count).store(0);
  std::atomic_ref(flags_->fault).store(0);
  flags_->bad_index = {};
  restart_locked();
  fault_.clear();
}

Status HandOver::fault() {
  if (flags_ != nullptr) check_flags();
  return fault_.status();
}

Status HandOver::take_bad_index() {
  if (flags_ == nullptr) return {};
  if (bad_index_.n_told == 0) {
    const std::atomic_ref n_told(flags_->bad_index.n_told), n_taken(flags_->bad_index.n_taken);
    const uint32_t n = n_told.load(std::memory_order_acquire);
    if (n == n_taken.load(std::memory_order_relaxed)) return {};
    bad_index_ = flags_->bad_index;
    n_taken.store(n, std::memory_order_release);
  }
  const BadIndex bad = std::exchange(bad_index_, {});
  return fail(
      TANDEM_ERROR_INVALID_ARGUMENT, "selection.idx",
      "an earlier call of layer %d: selection.idx[%lld, %d, %lld] = %d names no token up to the query's own, %lld, or "
      "does not ascend: the row's o and lse are NaN",
      bad.layer_idx, static_cast<long long>(bad.row), bad.head, static_cast<long long>(bad.place), bad.value,
      static_cast<long long>(bad.own));
}

double HandOver::bus_ahead_ns(int32_t layer_idx, int64_t n_queries) const {
  std::lock_guard lock(mutex_);
  return learner_.bus_ahead_ns(layer_idx, n_queries);
}

TaskSums HandOver::sums() const {
  std::lock_guard lock(mutex_);
  return learner_.sums();
}

// ---- the thread --------------------------------------------------------------------------------------------------------

void HandOver::loop() {
  const DefaultFpModes modes;  // a new thread inherits the modes of its creator
  pthread_setname_np(pthread_self(), "tandem-device");
  cpu_.table->keep_clear(cpu_.self);
  while (wait_for_post()) {
    HandOverTask& task = first_task();
    const AtWork at_work;
    if (at_work.may_begin()) {
      meet(task);
    } else {
      lose(&task);
      finish(task, {}, 0);
    }
  }
}

void HandOver::meet(HandOverTask& task) {
  TaskTimes times;
  times.stream.sent = task.sent;
  const bool has_arrived = !fault_.is_of_step() && wait_for_arrival(task, &times.stream);
  bool is_lost = !has_arrived || can_start_over();
  const TraceRange range("answer", task.shape.layer_idx, "host");
  HostPart& part = task.scratch.host;
  times.has_host = !is_lost && part.has_jobs();
  times.has_arrived = !is_lost;
  times.stream.look();  // the stream may already have ended: look before taking the time
  times.begin = Clock::now();
  const int64_t staged_bytes = is_lost ? 0 : part.take_rows() + task.copied_bytes;
  if (!is_lost && part.selects()) while_busy(kNoSelection, [&] { part.choose(); });
  // Named keys are scattered, so their time says nothing about other keys.
  if (times.has_host && part.brings_named()) task.part = {};
  if (times.has_host) attend(part, &times.stream);
  times.host_end = Clock::now();
  answer(task);
  if (!is_lost && task.named_in != nullptr)
    task.named_in->named = std::move(task.named);
  else if (!is_lost && !part.selects())
    while_busy("no memory for the keys that a call has named", [&] { part.note_named(); });
  if (has_arrived && part.observes()) {
    const bool is_observed = wait_for_observation(task);
    if (is_observed && !can_start_over())
      while_busy(kNoSelection, [&] { part.observe(); });
    else if (!is_observed && !can_start_over() && !task.launch_failed)
      task.is_unseen = true, note_lost();
    answer(task);
  }
  is_lost = is_lost || can_start_over();
  if (times.stream.is_awaited()) wait_for_stream(task, &times.stream);
  if (is_lost) {
    times.stream = {};
    times.has_arrived = false;
    lose(&task);
  }
  finish(task, times, staged_bytes);
}

void HandOver::lose(HandOverTask* task) {
  task->is_lost = true;
  note_lost();
}

void HandOver::finish(HandOverTask& task, const TaskTimes& times, int64_t staged_bytes) {
  {
    std::lock_guard lock(mutex_);
    learner_.sums().staged_kv_bytes += staged_bytes;
    learner_.learn(task, times, !fault_.any());
    finish_locked(task);
  }
  changed_finished_.notify_all();
}

// After tasks are lost, tickets may arrive that no task expects. Answering in advance keeps the device from waiting for
// them.
void HandOver::answer(const HandOverTask& task) {
  const std::atomic_ref answered(flags_->answered);
  if (!can_start_over())
    answered.store(task.ticket + 1, std::memory_order_release);
  else if (answered.load(std::memory_order_relaxed) < kLostTickets)
    answered.store(kLostTickets + task.ticket, std::memory_order_release);
}

bool HandOver::wait_for_post() {
  const auto begin = Clock::now();
  for (auto now = begin; now - begin < kSpin; now = Clock::now()) {
    if (has_posted()) return true;
    if (stop_.load(std::memory_order_relaxed) || retires_.load(std::memory_order_relaxed)) break;
    pause(now - begin);
  }
  std::unique_lock lock(mutex_);
  changed_posted_.wait(lock, [&] { return stop_ || retires_ || has_posted(); });
  return has_posted();
}

// Waits for the condition, or until the device is lost or the thread is stopped.
template <typename F>
bool HandOver::wait_for(F has_come) {
  const auto begin = Clock::now();
  auto next_check = begin + kBetweenChecks;
  while (!fault_.is_hopeless() && !stop_.load(std::memory_order_relaxed)) {
    if (has_come()) return true;
    if (process_ends()) fault_.set(TANDEM_ERROR_DEVICE_LOST, 0, "the process ends");
    const auto now = Clock::now();
    if (now - begin < kSpin) {
      pause(now - begin);
      continue;
    }
    std::this_thread::sleep_for(kNap);
    if (now < next_check) continue;
    next_check = now + kBetweenChecks;
    check_device();
  }
  return has_come();
}

// The task's copies may end before its ticket arrives, so both are watched.
bool HandOver::wait_for_arrival(const HandOverTask& task, StreamEnd* stream) {
  const std::atomic_ref arrived(flags_->arrived);
  const auto has_come = [&] { return arrived.load(std::memory_order_acquire) > task.ticket; };
  const bool has_arrived = wait_for([&] {
                             learner_.look_at_merged();
                             if (has_come() || is_abandoned(task)) return true;
                             stream->look();
                             if (!is_over(task) || has_come()) return false;
                             fault_of_step(task);
                             return true;
                           }) &&
                           has_come();
  if (has_arrived) learner_.note_merged();
  if (!has_arrived || task.is_its_own()) return has_arrived;
  fault_.set(DeviceFault::kOfStep, 0,
             "a graph was replayed twice in a step, outside one, with other layers or for fewer tokens than the step has");
  return false;
}

bool HandOver::wait_for_observation(const HandOverTask& task) {
  const std::atomic_ref observed(flags_->observed);
  const auto has_come = [&] { return observed.load(std::memory_order_acquire) > task.ticket; };
  wait_for([&] {
    if (has_come() || task.launch_failed.load(std::memory_order_acquire) || is_abandoned(task)) return true;
    if (!is_over(task) || has_come()) return false;
    fault_of_step(task);
    return true;
  });
  // After a failed launch a later ticket may have raised the count.
  return has_come() && !task.launch_failed.load(std::memory_order_acquire);
}

// Waits until the streamed data is no longer read, also for lost tasks. On a lost device nothing reads it.
void HandOver::wait_for_stream(const HandOverTask& task, StreamEnd* end) {
  wait_for([&] {
    end->look();
    return end->is_seen || task.launch_failed.load(std::memory_order_acquire);
  });
  end->look();
}

// Runs an action that may take long, as another caller may hold the pool. The flag tells the device that its turn will come.
// no_memory: text of the fault if the action runs out of memory.
template <typename F>
void HandOver::while_busy(const char* no_memory, F action) {
  const std::atomic_ref busy(flags_->busy);
  busy.store(1, std::memory_order_release);
  try {
    action();
  } catch (const std::bad_alloc&) {
    fault_.set(TANDEM_ERROR_OUT_OF_MEMORY, 0, no_memory);
  }
  busy.store(0, std::memory_order_release);
}

void HandOver::check_device() {
  DeviceError error;
  const int32_t code = device_.table->check(device_.self, &error);
  if (code != TANDEM_OK) return fault_.set(code, error.underlying, error.message);
  check_flags();
}

void HandOver::check_flags() {
  if (std::atomic_ref(flags_->fault).load(std::memory_order_acquire) != 0)
    fault_.set(TANDEM_ERROR_DEVICE_LOST, 0, "the device waited for the host in vain");
}

// True if the step of the task has ended on the device.
bool HandOver::is_over(const HandOverTask& task) const {
  const auto ended = std::atomic_ref(flags_->ended).load(std::memory_order_acquire);
  return task.step > 0 && static_cast<uint8_t>(ended - task.step) < 128;
}

void HandOver::fault_of_step(const HandOverTask& task) {
  char text[96];
  std::snprintf(text, sizeof text, "a step ended before layer %d was attended", task.shape.layer_idx);
  fault_.set(DeviceFault::kOfStep, 0, text);
}

// If keys are streamed at the same time, the calling thread checks now and then whether the stream has ended.
void HandOver::attend(HostPart& part, StreamEnd* stream) {
  bool is_done = false;
  while_busy("no memory for the host's part", [&] {
    if (fault_.any()) return;
    const Watch watch{nullptr,
                      [](int64_t, int64_t, void* end) {
                        static_cast<StreamEnd*>(end)->look();
                        return int32_t{0};
                      },
                      stream};
    const Status status = part.attend(stream->is_awaited() ? &watch : nullptr);
    is_done = status.ok();
    if (!is_done) fault_.set(status.code(), status.info().underlying, status.info().message.c_str());
  });
  if (!is_done) part.lose();  // the device must not wait for a part that will not come
}

}  // namespace tandem
