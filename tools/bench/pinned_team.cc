// SPDX-License-Identifier: MIT
#include "tools/bench/pinned_team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>

#include "tools/bench/machine_facts.h"

namespace tools {
namespace {

double now_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

PinnedTeam::PinnedTeam(int32_t n_threads) : clocks_(static_cast<size_t>(n_threads)) {
  const std::vector<int32_t> cpus = cpus_by_core();
  for (int32_t i = 0; i < n_threads; ++i) {
    const int32_t cpu = cpus.empty() ? 0 : cpus[static_cast<size_t>(i) % cpus.size()];
    threads_.emplace_back([this, i, cpu] { loop(i, cpu); });
  }
}

PinnedTeam::~PinnedTeam() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

double PinnedTeam::run(const std::function<void(int32_t)>& work) {
  std::unique_lock lock(mutex_);
  work_ = &work;
  n_running_ = size();
  n_awake_ = 0;
  ++pass_;
  wake_.notify_all();
  done_.wait(lock, [&] { return n_running_ == 0; });
  double start = clocks_[0].start, end = clocks_[0].end;
  for (const Clock& clock : clocks_) {
    start = std::min(start, clock.start);
    end = std::max(end, clock.end);
  }
  return end - start;
}

void PinnedTeam::loop(int32_t thread_idx, int32_t cpu) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(cpu, &mask);
  pthread_setaffinity_np(pthread_self(), sizeof mask, &mask);
  Clock& clock = clocks_[static_cast<size_t>(thread_idx)];
  for (int64_t seen = 0;;) {
    const std::function<void(int32_t)>* work = nullptr;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || pass_ != seen; });
      if (stop_) return;
      seen = pass_;
      work = work_;
    }
    ++n_awake_;
    while (n_awake_ < size()) sched_yield();
    clock.start = now_seconds();
    (*work)(thread_idx);
    clock.end = now_seconds();
    {
      std::lock_guard lock(mutex_);
      if (--n_running_ == 0) done_.notify_one();
    }
  }
}

}  // namespace tools
