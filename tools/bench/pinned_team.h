// SPDX-License-Identifier: MIT
// Threads for the probes of the machine. Each is bound to a CPU and sleeps between passes; all start together.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tools {

class PinnedTeam {
 public:
  explicit PinnedTeam(int32_t n_threads);
  ~PinnedTeam();
  PinnedTeam(const PinnedTeam&) = delete;
  PinnedTeam& operator=(const PinnedTeam&) = delete;

  int32_t size() const { return static_cast<int32_t>(threads_.size()); }
  // Runs work(thread_idx) on every thread. Returns the seconds from the first start, once all are awake, to the last end.
  double run(const std::function<void(int32_t)>& work);

 private:
  struct alignas(64) Clock {
    double start = 0, end = 0;
  };
  void loop(int32_t thread_idx, int32_t cpu);

  std::vector<std::thread> threads_;
  std::vector<Clock> clocks_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int32_t)>* work_ = nullptr;
  int64_t pass_ = 0;
  int32_t n_running_ = 0;
  bool stop_ = false;
  std::atomic<int32_t> n_awake_{0};
};

}  // namespace tools
