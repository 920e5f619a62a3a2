// SPDX-License-Identifier: MIT
// How many calls on device tensors are under way in all sessions of an engine. Whoever counts may hold its own lock; nothing
// else is locked in here.
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
  bool drain(int64_t timeout_ns) {  // until there are none; below 0: however long that takes
    std::unique_lock lock(mutex_);
    const auto is_none = [this] { return n_ == 0; };
    constexpr int64_t kForEver = int64_t{1} << 60;  // what the clock can still count to
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
