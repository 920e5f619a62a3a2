// SPDX-License-Identifier: MIT
// The workers of the CPU backend: one thread per core, bound by hwloc. The calling thread is worker 0.
//
// A call to run() publishes a task list. All workers, the caller included, take tasks until none is left. A worker that
// finds no task spins for spin_ns, then sleeps on a futex. Nothing is allocated after create().
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lib/base/status.h"
#include "lib/tables/backend.h"

namespace tandem::cpu {

struct PoolOptions {
  int32_t n_threads = 0;     // 0: affinity mask and cgroup quota, less n_others
  int64_t spin_ns = 50'000;  // counts as 0 if there are more workers than CPUs or quota
  bool pin_threads = true;
  int32_t n_others = 0;  // threads that are busy while the workers are, without the caller
};

// Gives a worker its tasks, one after another.
class TaskSource {
 public:
  virtual int64_t next() = 0;  // -1: no task is left

 protected:
  ~TaskSource() = default;
};

// Gives all tasks to one worker.
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
  // Calls work(context, tasks, worker) on workers until tasks 0 to n_tasks - 1 are all taken. Returns when all these calls
  // have returned. A worker that takes a task must do it, but may take more tasks before. Tasks are taken in ascending
  // order. `task_node` changes that order: workers of a task's NUMA node are preferred, provided that each worker is bound
  // to a CPU (null: all tasks kAllNodes). The calling thread counts for the node on which it runs at that time. Concurrent
  // callers wait for their turn. A task may not call run(). On every worker, the caller included, tasks see one OpenMP
  // thread and default FP modes. Work may throw on any worker. Then no more tasks are taken, all calls return, and share()
  // throws the first exception in the caller; the pool stays usable.
  virtual void share(int64_t n_tasks, WorkFn work, void* context, const int32_t* task_node = nullptr) = 0;
  // Shares the tasks in the same way and calls task(context, i, worker) for each.
  void run(int64_t n_tasks, TaskFn task, void* context, const int32_t* task_node = nullptr);
  // From wake() to rest() workers spin without sleeping, but at most a millisecond (or spin_ns, if longer) after the last
  // run(). The pairs may be nested. A rest() without its wake() does nothing.
  virtual void wake() = 0;
  virtual void rest() = 0;
  // These two are described in lib/tables/backend.h.
  virtual void place(void* data, int64_t bytes, int32_t node) = 0;
  virtual void keep_clear() = 0;
  virtual std::string report() const = 0;  // JSON object
};

}  // namespace tandem::cpu
