// SPDX-License-Identifier: MIT
#include "lib/machine/worker.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "lib/base/fp_modes.h"
#include "lib/base/signals.h"

namespace tandem {

Status Worker::create(const char* name, bool yields, std::unique_ptr<Worker>* worker) {
  auto made = std::make_unique<Worker>();
  const SignalsBlocked blocked;
  int error = 0;
  try {
    made->thread_ = std::thread([w = made.get(), name, yields] { w->loop(name, yields); });
  } catch (const std::system_error& e) {
    error = e.code().value();
  }
  if (error != 0) return fail_system(TANDEM_ERROR_SYSTEM, error, "n_threads", "the background thread could not be started");
  *worker = std::move(made);
  return {};
}

Worker::~Worker() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  posted_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Worker::post(Job& job) {
  {
    std::lock_guard lock(mutex_);
    if (job.state == Job::State::kRunning) job.again = true;
    if (job.state != Job::State::kIdle) return;
    queue(job);
  }
  posted_.notify_one();
}

void Worker::queue(Job& job) {
  job.state = Job::State::kQueued;
  if (!job.is_hint) ++n_queued_;
  job.previous = last_;
  job.next = nullptr;
  (last_ ? last_->next : first_) = &job;
  last_ = &job;
}

void Worker::unlink(Job& job) {
  if (!job.is_hint) --n_queued_;
  (job.previous ? job.previous->next : first_) = job.next;
  (job.next ? job.next->previous : last_) = job.previous;
  job.previous = job.next = nullptr;
}

void Worker::run_queued(Job& job, std::unique_lock<std::mutex>* lock) {
  unlink(job);
  job.state = Job::State::kRunning;
  if (!job.is_hint) ++n_running_;
  lock->unlock();
  job.run(job.context);
  lock->lock();
  job.state = Job::State::kIdle;
  if (!job.is_hint) --n_running_;
  if (std::exchange(job.again, false)) {
    queue(job);
    posted_.notify_one();
  }
  finished_.notify_all();
}

int64_t Worker::join(Job& job) { return join(job, {}); }

int64_t Worker::join(Job& job, const Watch& watch) {
  using Clock = std::chrono::steady_clock;
  std::unique_lock lock(mutex_);
  if (job.state == Job::State::kIdle) return 0;
  const auto start = Clock::now();
  if (job.state == Job::State::kQueued && !(job.is_long && watch.cancel != nullptr)) {
    run_queued(job, &lock);
  } else {
    const auto is_idle = [&] { return job.state == Job::State::kIdle; };
    constexpr std::chrono::milliseconds kBetweenLooks{2};  // between two looks at the flag, which wakes no thread
    if (watch.cancel == nullptr) finished_.wait(lock, is_idle);
    while (!watch.is_cancelled() && !finished_.wait_for(lock, kBetweenLooks, is_idle)) {
    }
  }
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

void Worker::cancel(Job& job) {
  std::unique_lock lock(mutex_);
  if (job.state == Job::State::kQueued) {
    unlink(job);
    job.state = Job::State::kIdle;
    finished_.notify_all();
  }
  job.again = false;
  finished_.wait(lock, [&] { return job.state == Job::State::kIdle; });
}

bool Worker::drain(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  const auto empty = [&] { return n_queued_ == 0 && n_running_ == 0; };
  constexpr int64_t kForEver = int64_t{1} << 60;  // the longest time that the clock can represent
  if (timeout_ns < 0 || timeout_ns > kForEver) {
    finished_.wait(lock, empty);
    return true;
  }
  return finished_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), empty);
}

void Worker::loop(const char* name, bool yields) {
  const DefaultFpModes modes;  // a new thread inherits the modes of its creator
  pthread_setname_np(pthread_self(), name);
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));
  if (yields) (void)setpriority(PRIO_PROCESS, thread, getpriority(PRIO_PROCESS, thread) + 10);
  std::unique_lock lock(mutex_);
  for (;;) {
    posted_.wait(lock, [&] { return stop_ || first_ != nullptr; });
    if (stop_) return;
    run_queued(*first_, &lock);
  }
}

}  // namespace tandem
