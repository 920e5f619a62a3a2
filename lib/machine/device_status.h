// SPDX-License-Identifier: MIT
// Translates errors of a device module into the library's own.
#pragma once

#include <algorithm>
#include <string>

#include "lib/base/status.h"
#include "lib/machine/device_ref.h"

namespace tandem {

// A module's text ends at its NUL, or at the end of its array.
template <size_t n>
std::string text_of(const char (&text)[n]) {
  return std::string(text, std::find(text, text + n, '\0'));
}

inline std::string reason_of(const DeviceError& error) {
  const std::string message = text_of(error.message);
  return message.empty() ? "the module gives no reason" : message;
}

// code: the return value of the module's function.
inline Status device_status(int32_t code, const DeviceError& error) {
  if (code == TANDEM_OK) return {};
  return fail_with(code, error.underlying, text_of(error.field).c_str(), "device: " + reason_of(error));
}

// call_device(device, &DeviceTable::copy, to, from, bytes, stream)
template <typename... Parameters, typename... Arguments>
Status call_device(const Device& device, int32_t (*DeviceTable::*function)(void*, Parameters...), Arguments... arguments) {
  DeviceError error;
  return device_status((device.table->*function)(device.self, arguments..., &error), error);
}

// Sets *captures if calls on the stream are recorded for a graph instead of being run.
inline Status is_capturing(const Device& device, void* stream, bool* captures) {
  int32_t is = 0;
  TANDEM_TRY(call_device(device, &DeviceTable::capturing, stream, &is));
  *captures = is != 0;
  return {};
}

}  // namespace tandem
