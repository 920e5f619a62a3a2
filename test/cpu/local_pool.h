// SPDX-License-Identifier: MIT
// A plain pool of threads without binding, for tests of kernels with any number of workers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/pool.h"

namespace tandem::test {

class LocalPool final : public cpu::Pool {
 public:
  explicit LocalPool(int32_t n_workers) : n_workers_(n_workers) {
    for (int32_t i = 1; i < n_workers; ++i) threads_.emplace_back([this, i] { work(i); });
  }
  ~LocalPool() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wakeup_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int32_t n_workers() const override { return n_workers_; }
  int32_t n_nodes() const override { return 1; }
  void run(int64_t n_tasks, TaskFn task, void* context, const int32_t*) override {
    const std::lock_guard turn(turn_);
    {
      const std::lock_guard lock(mutex_);
      task_ = task;
      context_ = context;
      n_tasks_ = n_tasks;
      next_.store(0);
      n_busy_ = n_workers_ - 1;
      ++round_;
    }
    wakeup_.notify_all();
    take_tasks(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return n_busy_ == 0; });
  }
  void wake() override {}
  void rest() override {}
  void place(void*, int64_t, int32_t) override {}
  void keep_clear() override {}
  std::string report() const override { return "{\"workers\":" + std::to_string(n_workers_) + "}"; }

 private:
  void take_tasks(int32_t worker) {
    for (int64_t i; (i = next_.fetch_add(1)) < n_tasks_;) task_(context_, i, worker);
  }
  void work(int32_t worker) {
    for (int64_t seen = 0;;) {
      {
        std::unique_lock lock(mutex_);
        wakeup_.wait(lock, [&] { return stop_ || round_ != seen; });
        if (stop_) return;
        seen = round_;
      }
      take_tasks(worker);
      const std::lock_guard lock(mutex_);
      if (--n_busy_ == 0) done_.notify_one();
    }
  }

  const int32_t n_workers_;
  std::vector<std::thread> threads_;
  std::mutex turn_, mutex_;
  std::condition_variable wakeup_, done_;
  std::atomic<int64_t> next_{0};
  TaskFn task_ = nullptr;
  void* context_ = nullptr;
  int64_t n_tasks_ = 0, round_ = 0;
  int32_t n_busy_ = 0;
  bool stop_ = false;
};

}  // namespace tandem::test
