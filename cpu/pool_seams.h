// SPDX-License-Identifier: MIT
// Replaced by the tests of the pool: the machine it sees, the CPU each thread is on, and the starting of threads.
#pragma once

#include <pthread.h>

#include <memory>

#include "cpu/cgroup.h"
#include "cpu/pool.h"
#include "cpu/topology.h"

namespace tandem::cpu {

// Creates a pool, as Pool::create(), on a given machine.
struct PoolSeams {
  TopologyOptions topology;
  CgroupPaths cgroup;
  int (*bind_this_thread)(const Seat& seat) = nullptr;  // returns 0 or an errno; null: Topology's function
  int (*current_cpu)() = nullptr;                       // null: sched_getcpu()
};
Status create_pool(const PoolOptions& options, const PoolSeams& seams, std::unique_ptr<Pool>* pool);

// Starts a thread; returns 0 or an errno, as pthread_create(). Applies to the whole process; null restores pthread_create().
using StartThreadFn = int (*)(pthread_t* thread, void* (*body)(void*), void* argument);
void set_start_thread(StartThreadFn start_thread);

}  // namespace tandem::cpu
