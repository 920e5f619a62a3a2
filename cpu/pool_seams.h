// SPDX-License-Identifier: MIT
// What the tests of the pool replace: the machine it sees, where its threads are, and the starting of threads.
#pragma once

#include <pthread.h>

#include <memory>

#include "cpu/cgroup.h"
#include "cpu/pool.h"
#include "cpu/topology.h"

namespace tandem::cpu {

// Pool::create() on a given machine.
struct PoolSeams {
  TopologyOptions topology;
  CgroupPaths cgroup;
  int (*bind_this_thread)(const Seat& seat) = nullptr;  // 0 or an errno; null: Topology's
  int (*current_cpu)() = nullptr;                       // null: sched_getcpu()
};
Status create_pool(const PoolOptions& options, const PoolSeams& seams, std::unique_ptr<Pool>* pool);

// Starts a thread: 0 or an errno, as pthread_create. For the whole process, null: pthread_create itself.
using StartThreadFn = int (*)(pthread_t* thread, void* (*body)(void*), void* argument);
void set_start_thread(StartThreadFn start_thread);

}  // namespace tandem::cpu
