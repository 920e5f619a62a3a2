// SPDX-License-Identifier: MIT
// The workers of the CPU backend: one thread per core, bound by hwloc, the calling thread being worker 0.
//
// A call to run() publishes a task list and everyone, caller included, takes tasks until none is left. Workers that
// found nothing spin for spin_ns, then sleep on a futex. Nothing is allocated after create().
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lib/base/status.h"
#include "lib/tables/backend.h"

namespace tandem::cpu {

struct PoolOptions {
  int32_t n_threads = 0;     // 0: affinity mask and cgroup quota, less what n_others need
  int64_t spin_ns = 50'000;  // counts as 0 when there are more workers than CPUs or quota
  bool pin_threads = true;
  int32_t n_others = 0;  // threads that are busy while the workers are, the caller not among them
};

// What a worker takes its tasks from, one after another.
class TaskSource {
 public:
  virtual int64_t next() = 0;  // -1: none is left

 protected:
  ~TaskSource() = default;
};

// All tasks for one worker.
class TasksInTurn final : public TaskSource {
 public:
  explicit TasksInTurn(int64_t n_tasks) : n_tasks_(n_tasks) {}
  int64_t next() override { return next_ < n_tasks_ ? next_++ : -1; }

 private:
  int64_t n_tasks_, next_ = 0;
};

using WorkFn = void (*)(void* context, TaskSource& tasks, int32_t worker_idx);

class Pool {
 public:
  static Status create(const PoolOptions& options, std::unique_ptr<Pool>* pool);
  virtual ~Pool() = default;

  virtual int32_t n_workers() const = 0;
  virtual int32_t n_nodes() const = 0;
  // Calls work(context, tasks, worker) on workers until tasks 0 to n_tasks - 1 are all taken, and returns when all calls
  // have returned. Who takes a task does it; it may take another one first. Tasks are taken in ascending order. task_node
  // (null: all kAllNodes) prefers workers of that NUMA node and changes that order, provided that each worker is bound to a
  // CPU; the caller counts where it is at that time. Concurrent callers wait their turn; a task may not call run(). On every
  // worker, the caller included, tasks see one OpenMP thread and default FP modes. Work may throw on any worker: then no
  // more tasks are taken, and when all calls have returned the caller throws what came first; the pool goes on as before.
  virtual void share(int64_t n_tasks, WorkFn work, void* context, const int32_t* task_node = nullptr) = 0;
  // The same with task(context, i, worker) for each.
  void run(int64_t n_tasks, TaskFn task, void* context, const int32_t* task_node = nullptr);
  // Workers spin without sleeping between wake() and rest() (nestable), for a millisecond at most after the last run(). A
  // rest() without its wake() does nothing.
  virtual void wake() = 0;
  virtual void rest() = 0;
  // As in lib/tables/backend.h.
  virtual void place(void* data, int64_t bytes, int32_t node) = 0;
  virtual void keep_clear() = 0;
  virtual std::string report() const = 0;  // JSON object
};

}  // namespace tandem::cpu
