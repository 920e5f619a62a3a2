// SPDX-License-Identifier: MIT
// Errors of a device module as the library's own.
#pragma once

#include <algorithm>
#include <string>

#include "lib/device.h"
#include "lib/status.h"

namespace tandem {

// Texts of a module end with their array, if not before.
template <size_t n>
std::string text_of(const char (&text)[n]) {
  return std::string(text, std::find(text, text + n, '\0'));
}

inline std::string reason_of(const DeviceError& error) {
  const std::string message = text_of(error.message);
  return message.empty() ? "the module gives no reason" : message;
}

// code: what the module's function returned.
inline Status device_status(int32_t code, const DeviceError& error) {
  if (code == TANDEM_OK) return {};
  return fail_with(code, error.underlying, text_of(error.field).c_str(), "device: " + reason_of(error));
}

}  // namespace tandem
