// SPDX-License-Identifier: MIT
#include "lib/hand_over.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>
#include <system_error>

#include "lib/fp_modes.h"
#include "lib/lost_tickets.h"
#include "lib/process_end.h"
#include "lib/signals.h"
#include "lib/trace.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

// A step's next ticket comes within tens of microseconds. Where it does not, other threads may have better use of the CPU:
// those of other sessions are kept on the same few. What takes longer still is a device busy with other things: the thread
// then naps, and looks whether the device is still there.
constexpr std::chrono::microseconds kEager(100), kSpin(2000), kNap(50), kBetweenChecks(20'000);
constexpr int kPausesPerLook = 32;

constexpr char kNoSelection[] = "no memory for a refresh of the selections";
constexpr int32_t kOfStep = TANDEM_ERROR_INVALID_STATE;  // faults that nothing else has

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
      if (h->end_ != nullptr) h->end_(h->end_context_);  // the last of it
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
  changed_posted_.notify_all();  // with the mutex held: without it this may be gone
}

void HandOver::restart(ExchangeFlags* flags) {
  std::lock_guard lock(mutex_);
  if (flags_ != nullptr) flags->ended = flags_->ended;  // steps are counted on
  flags_ = flags;
  unmerged_ = {};
  first_idx_ = posted_.load(std::memory_order_relaxed);
}

void HandOver::start_over() {
  std::lock_guard lock(mutex_);
  for (uint64_t* count : {&flags_->arrived, &flags_->answered, &flags_->observed}) std::atomic_ref(*count).store(0);
  std::atomic_ref(flags_->fault).store(0);
  first_idx_ = posted_.load(std::memory_order_relaxed);
  fault_code_ = TANDEM_OK;
  can_start_over_.store(false, std::memory_order_release);
  faulted_.store(false, std::memory_order_release);
}

HandOverTask& HandOver::next_task(int64_t ahead) {
  const uint64_t idx = posted_.load(std::memory_order_relaxed) + static_cast<uint64_t>(ahead);
  const auto is_free = [&] { return idx - finished_.load(std::memory_order_acquire) < tasks_.size(); };
  if (!is_free()) {
    std::unique_lock lock(mutex_);
    changed_finished_.wait(lock, is_free);
  }
  HandOverTask& task = tasks_[static_cast<size_t>(idx % tasks_.size())];
  task.idx = idx;
  task.ticket = idx - first_idx_;
  return task;
}

void HandOver::post() {
  {
    std::lock_guard lock(mutex_);
    under_way_.add(1);
    posted_.fetch_add(1, std::memory_order_release);
  }
  changed_posted_.notify_one();
}

void HandOver::open_step(int64_t n_tasks) {
  {
    std::lock_guard lock(mutex_);
    open_from_.store(posted_.load(std::memory_order_relaxed), std::memory_order_release);
    posted_.fetch_add(static_cast<uint64_t>(n_tasks), std::memory_order_release);
  }
  changed_posted_.notify_one();
}

// What is left of the step is under way from here on: it may not have begun, and workers that sleep until its parts come
// would be late for each.
void HandOver::close_step() {
  std::lock_guard lock(mutex_);
  const uint64_t posted = posted_.load(std::memory_order_relaxed), finished = finished_.load(std::memory_order_relaxed);
  under_way_.add(static_cast<int64_t>(posted - std::max(finished, open_from_.load())));
  if (finished < posted)
    tasks_[static_cast<size_t>((posted - 1) % tasks_.size())].is_last = true;
  else
    cpu_.table->rest(cpu_.self);
  open_from_.store(UINT64_MAX, std::memory_order_release);
}

void HandOver::abandon_step() {
  abandoned_from_.store(open_from_.load(std::memory_order_acquire), std::memory_order_release);
  close_step();
}

void HandOver::drain() {
  std::unique_lock lock(mutex_);
  changed_finished_.wait(lock, [&] { return is_idle(); });
}

void HandOver::wait_for_rows(int64_t sequence, int32_t layer_idx, int64_t end) {
  const uint64_t posted = posted_.load(std::memory_order_relaxed);
  for (uint64_t idx = posted; idx > finished_.load(std::memory_order_acquire);) {
    const HandOverTask& task = tasks_[static_cast<size_t>(--idx % tasks_.size())];
    if (task.shape.layer_idx != layer_idx || !task.scratch.host.has_rows()) continue;
    const bool has_some = std::any_of(task.touched.begin(), task.touched.end(), [&](const TouchedSequence& one) {
      return one.sequence == sequence && one.length < end;
    });
    if (!has_some) continue;
    std::unique_lock lock(mutex_);
    return changed_finished_.wait(lock, [&] { return finished_.load(std::memory_order_acquire) > idx; });
  }
}

Status HandOver::fault() {
  if (flags_ != nullptr) check_flags();
  if (!faulted_.load(std::memory_order_acquire)) return {};
  std::lock_guard lock(mutex_);
  if (fault_code_ == kOfStep)
    return fail(fault_code_, "session", "%s: appended tokens from that step on are gone, other calls may follow",
                fault_text_);
  if (can_start_over())
    return fail(fault_code_, "session", "%s: tokens appended by that call and those since are gone, other calls may follow",
                fault_text_);
  return fail_system(fault_code_, fault_underlying_, "session",
                     "%s: host tensors still work, appended tokens that had not arrived are gone", fault_text_);
}

bool HandOver::is_of_step() const { return can_start_over() && fault_code_ == kOfStep; }

double HandOver::bus_ahead_ns(int32_t layer_idx, int64_t n_queries) const {
  std::lock_guard lock(mutex_);
  return part_times_.ahead_ns(layer_idx, n_queries);
}

HandOver::Sums HandOver::sums() const {
  std::lock_guard lock(mutex_);
  return sums_;
}

// ---- the thread --------------------------------------------------------------------------------------------------------

void HandOver::loop() {
  const DefaultFpModes modes;  // a thread starts with those of the thread that made it
  pthread_setname_np(pthread_self(), "tandem-device");
  cpu_.table->keep_clear(cpu_.self);
  while (wait_for_post()) {
    HandOverTask& task = tasks_[static_cast<size_t>(finished_.load(std::memory_order_relaxed) % tasks_.size())];
    const AtWork at_work;
    if (!at_work.may_begin()) {
      lose(&task);
      finish(task, {}, 0);
      continue;
    }
    TaskTimes times;
    times.stream.sent = task.sent;
    const bool has_arrived = !is_of_step() && wait_for_arrival(task, &times.stream);
    bool is_lost = !has_arrived || can_start_over();
    const TraceRange range("answer", task.shape.layer_idx, "host");
    HostPart& part = task.scratch.host;
    times.has_host = !is_lost && part.has_jobs();
    times.has_arrived = !is_lost;
    times.stream.look();  // what is there by now was there before
    times.begin = Clock::now();
    const int64_t staged_bytes = is_lost ? 0 : part.take_rows();
    if (!is_lost && part.observes()) while_busy(kNoSelection, [&] { part.choose(); });
    if (times.has_host) attend(part, &times.stream);
    times.host_end = Clock::now();
    answer(task);
    if (has_arrived && part.observes()) {
      const bool is_observed = wait_for_observation(task);
      if (is_observed && !can_start_over())
        while_busy(kNoSelection, [&] { part.observe(); });
      else if (!is_observed && !can_start_over() && !task.is_cut)
        task.is_unseen = true, has_lost_.store(true, std::memory_order_release);
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
}

void HandOver::lose(HandOverTask* task) {
  task->is_lost = true;
  has_lost_.store(true, std::memory_order_release);
}

void HandOver::finish(HandOverTask& task, const TaskTimes& times, int64_t staged_bytes) {
  {
    std::lock_guard lock(mutex_);
    sums_.staged_kv_bytes += staged_bytes;
    learn(task, times);
    const uint64_t idx = task.idx;
    const bool is_last = std::exchange(task.is_last, false);
    finished_.store(idx + 1, std::memory_order_release);  // whoever waits for the task's place may have it now
    if (is_last) cpu_.table->rest(cpu_.self);
    if (idx < open_from_.load(std::memory_order_relaxed)) under_way_.add(-1);
  }
  changed_finished_.notify_all();
}

// Once tasks are lost there may be tickets that nobody expects: no one is to wait for their answers.
void HandOver::answer(const HandOverTask& task) {
  const std::atomic_ref answered(flags_->answered);
  if (!can_start_over())
    answered.store(task.ticket + 1, std::memory_order_release);
  else if (answered.load(std::memory_order_relaxed) < kLostTickets)
    answered.store(kLostTickets + task.ticket, std::memory_order_release);
}

bool HandOver::wait_for_post() {
  const auto is_posted = [&] {
    return finished_.load(std::memory_order_relaxed) != posted_.load(std::memory_order_acquire);
  };
  const auto begin = Clock::now();
  for (auto now = begin; now - begin < kSpin; now = Clock::now()) {
    if (is_posted()) return true;
    if (stop_.load(std::memory_order_relaxed) || retires_.load(std::memory_order_relaxed)) break;
    pause(now - begin);
  }
  std::unique_lock lock(mutex_);
  changed_posted_.wait(lock, [&] { return stop_ || retires_ || is_posted(); });
  return is_posted();
}

// Until then, or until there is no hope.
template <typename F>
bool HandOver::wait_for(F has_come) {
  const auto begin = Clock::now();
  auto next_check = begin + kBetweenChecks;
  while (!is_hopeless() && !stop_.load(std::memory_order_relaxed)) {
    if (has_come()) return true;
    if (process_ends()) set_fault(TANDEM_ERROR_DEVICE_LOST, 0, "the process ends");
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

// Its copies may be done before it comes.
bool HandOver::wait_for_arrival(const HandOverTask& task, StreamEnd* stream) {
  const std::atomic_ref arrived(flags_->arrived);
  const auto has_come = [&] { return arrived.load(std::memory_order_acquire) > task.ticket; };
  const bool has_arrived = wait_for([&] {
                             look_at_merged();
                             if (has_come() || is_abandoned(task)) return true;
                             stream->look();
                             if (!is_over(task) || has_come()) return false;
                             fault_of_step(task);
                             return true;
                           }) &&
                           has_come();
  if (has_arrived) note_merged();
  if (!has_arrived || task.is_its_own()) return has_arrived;
  set_fault(kOfStep, 0,
            "a graph was replayed twice in a step, outside one, with other layers or for fewer tokens than the step has");
  return false;
}

bool HandOver::wait_for_observation(const HandOverTask& task) {
  const std::atomic_ref observed(flags_->observed);
  const auto has_come = [&] { return observed.load(std::memory_order_acquire) > task.ticket; };
  wait_for([&] {
    if (has_come() || task.is_cut.load(std::memory_order_acquire) || is_abandoned(task)) return true;
    if (!is_over(task) || has_come()) return false;
    fault_of_step(task);
    return true;
  });
  return has_come() && !task.is_cut.load(std::memory_order_acquire);  // else a later ticket's has come
}

void HandOver::StreamEnd::look() {
  const auto is_set = [](uint8_t* flag) {
    return flag == nullptr || std::atomic_ref(*flag).load(std::memory_order_acquire) != 0;
  };
  if (is_seen || !is_awaited() || !std::all_of(sent.begin(), sent.end(), is_set)) return;
  is_seen = true;
  seen = Clock::now();
}

int32_t HandOver::look_at_stream(int64_t, int64_t, void* end) {
  static_cast<StreamEnd*>(end)->look();
  return 0;
}

// Until nobody reads what is streamed any more, of tasks that are lost too. Where the device is lost, nobody does.
void HandOver::wait_for_stream(const HandOverTask& task, StreamEnd* end) {
  wait_for([&] {
    end->look();
    return end->is_seen || task.is_cut.load(std::memory_order_acquire);
  });
  end->look();
}

// What may take long, as who else has the pool may keep it: the device is told that its turn will come. no_memory: the fault
// where there is none.
template <typename F>
void HandOver::while_busy(const char* no_memory, F action) {
  const std::atomic_ref busy(flags_->busy);
  busy.store(1, std::memory_order_release);
  try {
    action();
  } catch (const std::bad_alloc&) {
    set_fault(TANDEM_ERROR_OUT_OF_MEMORY, 0, no_memory);
  }
  busy.store(0, std::memory_order_release);
}

void HandOver::check_device() {
  DeviceError error;
  const int32_t code = device_.table->check(device_.self, &error);
  if (code != TANDEM_OK) return set_fault(code, error.underlying, error.message);
  check_flags();
}

void HandOver::check_flags() {
  if (std::atomic_ref(flags_->fault).load(std::memory_order_acquire) != 0)
    set_fault(TANDEM_ERROR_DEVICE_LOST, 0, "the device waited for the host in vain");
}

// Whether the step that it is a part of has ended on the device.
bool HandOver::is_over(const HandOverTask& task) const {
  const auto ended = std::atomic_ref(flags_->ended).load(std::memory_order_acquire);
  return task.step > 0 && static_cast<uint8_t>(ended - task.step) < 128;
}

void HandOver::fault_of_step(const HandOverTask& task) {
  char text[96];
  std::snprintf(text, sizeof text, "a step ended before layer %d was attended", task.shape.layer_idx);
  set_fault(kOfStep, 0, text);
}

// Where keys are streamed at the same time, the calling thread looks now and then whether that has ended.
void HandOver::attend(HostPart& part, StreamEnd* stream) {
  bool is_done = false;
  while_busy("no memory for the host's part", [&] {
    if (faulted_.load(std::memory_order_relaxed)) return;
    const Watch watch{nullptr, look_at_stream, stream};
    const Status status = part.attend(stream->is_awaited() ? &watch : nullptr);
    is_done = status.ok();
    if (!is_done) set_fault(status.code(), status.info().underlying, status.info().message.c_str());
  });
  if (!is_done) part.lose();  // the device does not wait for what will not come
}

void HandOver::set_fault(int32_t code, int64_t underlying, const char* text) {
  const bool is_got_over = code == kOfStep || code == TANDEM_ERROR_OUT_OF_MEMORY;
  std::lock_guard lock(mutex_);
  if (faulted_.load(std::memory_order_relaxed) && (is_got_over || !can_start_over())) return;  // it is known already
  fault_code_ = code;
  fault_underlying_ = underlying;
  std::snprintf(fault_text_, sizeof fault_text_, "%s", text);
  can_start_over_.store(is_got_over, std::memory_order_release);
  faulted_.store(true, std::memory_order_release);
}

}  // namespace tandem
