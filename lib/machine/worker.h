// SPDX-License-Identifier: MIT
// One background thread for work off the critical path: selecting and compacting keys, pinning memory, or having the kernel
// clear memory that a token will need.
//
// A job lives inside the object it works on, so posting allocates nothing and cannot fail. Who needs a result calls
// join(): a job that nobody has begun is then run by the caller itself instead of waiting for its turn.
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
  bool is_long = false;  // may take a second: a caller that can be cancelled leaves it to the thread
  bool is_hint = false;  // makes something faster and nothing else: drain() does not wait for it

 private:
  friend class Worker;
  enum class State { kIdle, kQueued, kRunning };
  State state = State::kIdle;  // guarded by Worker::mutex_, as what follows
  bool again = false;          // posted while it ran
  Job* previous = nullptr;
  Job* next = nullptr;
};

class Worker {
 public:
  // name: of the thread. yields: to the threads that decode; best effort, it only changes who goes first.
  static Status create(const char* name, bool yields, std::unique_ptr<Worker>* worker);
  ~Worker();  // runs nothing more; waits for the job in progress

  // A job that runs is run once more, one that is queued is not queued again.
  void post(Job& job);
  int64_t join(Job& job);  // on return the job is idle; returns how long that took, in ns
  // The same, but stops waiting when watch.cancel is set; then the job may not be idle.
  int64_t join(Job& job, const Watch& watch);
  void cancel(Job& job);  // likewise, but a job that nobody has begun is not run
  bool drain(int64_t timeout_ns);

 private:
  void loop(const char* name, bool yields);
  void queue(Job& job);
  void unlink(Job& job);
  // Runs a queued job on the calling thread. The mutex is held before and after, and not while the job runs.
  void run_queued(Job& job, std::unique_lock<std::mutex>* lock);

  std::mutex mutex_;
  std::condition_variable posted_;
  std::condition_variable finished_;
  Job* first_ = nullptr;
  Job* last_ = nullptr;
  int64_t n_queued_ = 0, n_running_ = 0;  // that are no hints
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tandem
