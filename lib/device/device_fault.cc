// SPDX-License-Identifier: MIT
#include "lib/device/device_fault.h"

#include <cstdio>

namespace tandem {

void DeviceFault::set(int32_t code, int64_t underlying, const char* text) {
  const bool is_got_over = code == kOfStep || code == TANDEM_ERROR_OUT_OF_MEMORY;
  std::lock_guard lock(mutex_);
  if (any() && (is_got_over || !can_start_over())) return;
  code_ = code;
  underlying_ = underlying;
  std::snprintf(text_, sizeof text_, "%s", text);
  can_start_over_.store(is_got_over, std::memory_order_release);
  faulted_.store(true, std::memory_order_release);
}

void DeviceFault::clear() {
  std::lock_guard lock(mutex_);
  code_ = TANDEM_OK;
  can_start_over_.store(false, std::memory_order_release);
  faulted_.store(false, std::memory_order_release);
}

Status DeviceFault::status() const {
  if (!any()) return {};
  std::lock_guard lock(mutex_);
  if (code_ == kOfStep)
    return fail(code_, "session", "%s: appended tokens from that step on are gone, other calls may follow", text_);
  if (can_start_over())
    return fail(code_, "session", "%s: tokens appended by that call and those since are gone, other calls may follow",
                text_);
  return fail_system(code_, underlying_, "session",
                     "%s: host tensors still work, appended tokens that had not arrived are gone", text_);
}

}  // namespace tandem
