// SPDX-License-Identifier: MIT
// Why a session's tickets stopped. The loss of a device is final. After a failed step or a lack of host memory the session
// starts over.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "lib/base/status.h"

namespace tandem {

class DeviceFault {
 public:
  static constexpr int32_t kOfStep = TANDEM_ERROR_INVALID_STATE;  // only faults of a step have this code

  bool any() const { return faulted_.load(std::memory_order_acquire); }
  bool can_start_over() const { return can_start_over_.load(std::memory_order_acquire); }  // the device still works
  bool is_of_step() const { return can_start_over() && code_ == kOfStep; }
  bool is_hopeless() const { return any() && !can_start_over(); }
  void set(int32_t code, int64_t underlying, const char* text);  // only the loss of the device replaces an earlier fault
  void clear();
  Status status() const;  // ok if there is no fault

 private:
  std::atomic<bool> faulted_{false}, can_start_over_{false};
  std::atomic<int32_t> code_{TANDEM_OK};
  mutable std::mutex mutex_;
  int64_t underlying_ = 0;  // this and text_ are guarded by the mutex
  char text_[256] = "";
};

}  // namespace tandem
