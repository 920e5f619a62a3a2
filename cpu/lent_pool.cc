// SPDX-License-Identifier: MIT
// Each call of the caller's run() is one round: n_threads bodies take tasks from one counter until none is left. A body that
// runs after the others have finished finds nothing to do. So the caller may run the bodies on fewer threads, or one after
// another.
#include "cpu/lent_pool.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "cpu/pool_modes.h"

namespace tandem::cpu {
namespace {

class SharedTasks final : public TaskSource {
 public:
  SharedTasks(std::atomic<int64_t>& taken, int64_t n_tasks) : taken_(taken), n_tasks_(n_tasks) {}
  int64_t next() override {
    const int64_t task = taken_.fetch_add(1, std::memory_order_relaxed);
    return task < n_tasks_ ? task : -1;
  }

 private:
  std::atomic<int64_t>& taken_;
  int64_t n_tasks_;
};

struct Round {
  int64_t n_tasks;
  WorkFn work;
  void* context;
  std::atomic<int64_t> taken{0};
  std::atomic<bool> has_thrown{false};
  std::exception_ptr thrown{};
};

// Keeps an exception for the thread that called the pool. No exception reaches the lender's threads.
void run_body(int64_t worker_idx, void* round_of_call) {
  Round& round = *static_cast<Round*>(round_of_call);
  const TaskModes modes;
  SharedTasks tasks(round.taken, round.n_tasks);
  try {
    round.work(round.context, tasks, static_cast<int32_t>(worker_idx));
  } catch (...) {
    round.taken.store(round.n_tasks);
    if (!round.has_thrown.exchange(true)) round.thrown = std::current_exception();
  }
}

class LentPool final : public Pool {
 public:
  explicit LentPool(const LentThreads& threads) : threads_(threads) {}

  int32_t n_workers() const override { return threads_.n_threads; }
  int32_t n_nodes() const override { return 1; }
  void share(int64_t n_tasks, WorkFn work, void* context, const int32_t*) override {
    const std::lock_guard lock(mutex_);
    Round round{n_tasks, work, context};
    const int64_t n_bodies = std::min<int64_t>(n_tasks, threads_.n_threads);
    if (n_bodies == 1)
      run_body(0, &round);
    else if (n_bodies > 1)
      threads_.run(n_bodies, run_body, &round, threads_.user);
    if (round.taken.load() < n_tasks) run_body(0, &round);  // tasks that are left if run() has not run all bodies
    if (round.thrown) std::rethrow_exception(round.thrown);
  }
  void wake() override {}
  void rest() override {}
  void place(void*, int64_t, int32_t) override {}
  void keep_clear() override {}
  std::string report() const override { return "{\"lent\":true,\"n_workers\":" + std::to_string(threads_.n_threads) + "}"; }

 private:
  const LentThreads threads_;
  std::mutex mutex_;
};

}  // namespace

std::unique_ptr<Pool> make_lent_pool(const LentThreads& threads) { return std::make_unique<LentPool>(threads); }

}  // namespace tandem::cpu
