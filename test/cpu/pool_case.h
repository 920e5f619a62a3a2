// SPDX-License-Identifier: MIT
// Pools on this machine or a described one, and records of their tasks, for tests of the pool. Include it last, like
// cmocka.
#pragma once

#include <sched.h>

#include <atomic>
#include <memory>
#include <vector>

#include "cpu/pool.h"
#include "cpu/pool_seams.h"
#include "with_cmocka.h"

namespace tandem::cpu {

inline std::unique_ptr<Pool> make_pool(int32_t n_threads, int64_t spin_ns = 50'000, const PoolSeams& seams = {}) {
  std::unique_ptr<Pool> pool;
  assert_true(create_pool({n_threads, spin_ns, true}, seams, &pool).ok());
  assert_non_null(pool.get());
  return pool;
}

inline PoolSeams on_machine(const char* synthetic) {
  PoolSeams seams;
  seams.topology.synthetic = synthetic;
  seams.cgroup.proc = "/nonexistent";
  return seams;
}

// Records the tasks of one run. The tasks count here, and the test's own thread asserts afterwards.
struct Tally {
  explicit Tally(int64_t n_tasks, int32_t n_workers) : counts(n_tasks), order(n_workers), busy(n_workers) {}
  std::vector<std::atomic<int32_t>> counts;
  std::vector<std::vector<int64_t>> order;  // tasks of each worker, in the order in which the worker ran them
  std::vector<std::atomic<int32_t>> busy;
  std::atomic<int32_t> n_wrong{0};

  static void task(void* context, int64_t i, int32_t worker) {
    Tally& tally = *static_cast<Tally*>(context);
    if (worker < 0 || worker >= static_cast<int32_t>(tally.busy.size()) || i < 0 ||
        i >= static_cast<int64_t>(tally.counts.size())) {
      tally.n_wrong.fetch_add(1);
      return;
    }
    if (tally.busy[worker].exchange(1) != 0) tally.n_wrong.fetch_add(1);
    tally.counts[i].fetch_add(1);
    tally.order[worker].push_back(i);
    tally.busy[worker].store(0);
  }
  void assert_each_once() const {
    assert_int_equal(n_wrong.load(), 0);
    for (const auto& count : counts) assert_int_equal(count.load(), 1);
  }
};

// Tasks that all wait for each other. The run returns only if n_tasks workers take one task each.
struct Meeting {
  explicit Meeting(int32_t n) : n_expected(n) {}
  int32_t n_expected;
  std::atomic<int32_t> n_here{0};
  void (*look)(void* context, int32_t worker) = nullptr;
  void* context = nullptr;

  static void task(void* self, int64_t, int32_t worker) {
    Meeting& meeting = *static_cast<Meeting*>(self);
    if (meeting.look != nullptr) meeting.look(meeting.context, worker);
    meeting.n_here.fetch_add(1);
    while (meeting.n_here.load() < meeting.n_expected) sched_yield();
  }
};

}  // namespace tandem::cpu
