// SPDX-License-Identifier: MIT
// The workers of the CPU backend: one thread per core, bound by hwloc, the calling thread being worker 0.
//
// A call to run() publishes a task list and everyone, caller included, takes tasks until none is left. Workers that
// found nothing spin for spin_ns, then sleep on a futex. Nothing is allocated after create().
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lib/backend.h"
#include "lib/status.h"

namespace tandem::cpu {

struct PoolOptions {
  int32_t n_threads = 0;     // 0: affinity mask and cgroup quota, less what n_others need
  int64_t spin_ns = 50'000;  // counts as 0 when there are more workers than CPUs or quota
  bool pin_threads = true;
  int32_t n_others = 0;  // threads that are busy while the workers are, the caller not among them
};

class Pool {
 public:
  static Status create(const PoolOptions& options, std::unique_ptr<Pool>* pool);
  virtual ~Pool() = default;

  virtual int32_t n_workers() const = 0;
  virtual int32_t n_nodes() const = 0;
  // Calls task(context, i, worker) once for each i in [0, n_tasks) and returns when all have returned. Tasks are taken
  // in ascending order. task_node (null: all kAllNodes) prefers workers of that NUMA node and changes that order, provided
  // that each worker is bound to a CPU; the caller counts where it is at that time. Concurrent callers wait their turn; a
  // task may not call run(). On every worker, the caller included, tasks see one OpenMP thread and default FP modes.
  virtual void run(int64_t n_tasks, TaskFn task, void* context, const int32_t* task_node = nullptr) = 0;
  // Workers spin without sleeping between wake() and rest() (nestable), for a millisecond at most after the last run(). A
  // rest() without its wake() does nothing.
  virtual void wake() = 0;
  virtual void rest() = 0;
  // As in lib/backend.h.
  virtual void place(void* data, int64_t bytes, int32_t node) = 0;
  virtual void keep_clear() = 0;
  virtual std::string report() const = 0;  // JSON object
};

}  // namespace tandem::cpu
