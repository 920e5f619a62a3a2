// SPDX-License-Identifier: MIT
// A background thread for work off the critical path: selecting and compacting keys, pinning memory, or having the kernel
// clear memory that a token will need.
//
// A job lives inside the object it works on, so posting allocates nothing and cannot fail. A thread that needs a result
// calls join(). If the job has not begun, the joining thread runs it at once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "lib/base/status.h"
#include "lib/tables/backend.h"

namespace tandem {

struct Job {
  void (*run)(void* context) = nullptr;
  void* context = nullptr;
  bool is_long = false;  // may take a second: a cancellable caller leaves it to the thread
  bool is_hint = false;  // only makes later work faster: drain() does not wait for it

 private:
  friend class Worker;
  enum class State { kIdle, kQueued, kRunning };
  State state = State::kIdle;  // this and the members below are guarded by Worker::mutex_
  bool again = false;          // posted again while it ran
  Job* previous = nullptr;
  Job* next = nullptr;
};

class Worker {
 public:
  // name: the thread's. yields: the thread yields to decoding threads. Best effort, and only a matter of priority.
  static Status create(const char* name, bool yields, std::unique_ptr<Worker>* worker);
  ~Worker();  // starts no more jobs; waits for the job in progress

  // A running job will run once more. A queued job is not queued again.
  void post(Job& job);
  int64_t join(Job& job);  // on return the job is idle; returns the time waited in ns
  // Stops waiting when watch.cancel is set. The job may then still be queued or running.
  int64_t join(Job& job, const Watch& watch);
  void cancel(Job& job);  // like join(), but a job that has not begun is dropped
  bool drain(int64_t timeout_ns);

 private:
  void loop(const char* name, bool yields);
  void queue(Job& job);
  void unlink(Job& job);
  // Runs a queued job on the calling thread. The mutex is held before and after the call, but not while the job runs.
  void run_queued(Job& job, std::unique_lock<std::mutex>* lock);

  std::mutex mutex_;
  std::condition_variable posted_;
  std::condition_variable finished_;
  Job* first_ = nullptr;
  Job* last_ = nullptr;
  int64_t n_queued_ = 0, n_running_ = 0;  // without hints
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tandem
