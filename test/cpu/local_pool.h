// SPDX-License-Identifier: MIT
// A plain thread pool without binding to processors, for tests of kernels with any number of workers.
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
    for (int32_t i = 1; i < n_workers; ++i) threads_.emplace_back([this, i] { serve(i); });
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
  void share(int64_t n_tasks, cpu::WorkFn work, void* context, const int32_t*) override {
    const std::lock_guard turn(turn_);
    {
      const std::lock_guard lock(mutex_);
      work_ = work;
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
  class Taker final : public cpu::TaskSource {
   public:
    explicit Taker(LocalPool& pool) : pool_(pool) {}
    int64_t next() override {
      const int64_t i = pool_.next_.fetch_add(1);
      return i < pool_.n_tasks_ ? i : -1;
    }

   private:
    LocalPool& pool_;
  };
  void take_tasks(int32_t worker) {
    Taker tasks(*this);
    work_(context_, tasks, worker);
  }
  void serve(int32_t worker) {
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
  cpu::WorkFn work_ = nullptr;
  void* context_ = nullptr;
  int64_t n_tasks_ = 0, round_ = 0;
  int32_t n_busy_ = 0;
  bool stop_ = false;
};

}  // namespace tandem::test
