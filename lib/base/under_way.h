// SPDX-License-Identifier: MIT
// Number of calls on device tensors in flight, over all sessions of an engine. The functions lock nothing but their own
// mutex, so callers may hold a lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace tandem {

class UnderWay {
 public:
  void add(int64_t n) {
    std::lock_guard lock(mutex_);
    n_ += n;
    if (n_ == 0) none_left_.notify_all();
  }
  bool drain(int64_t timeout_ns) {  // waits until the count is 0; below 0: without a timeout
    std::unique_lock lock(mutex_);
    const auto is_none = [this] { return n_ == 0; };
    constexpr int64_t kForEver = int64_t{1} << 60;  // the longest time that the clock can represent
    if (timeout_ns >= 0 && timeout_ns <= kForEver)
      return none_left_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), is_none);
    none_left_.wait(lock, is_none);
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable none_left_;
  int64_t n_ = 0;
};

}  // namespace tandem
