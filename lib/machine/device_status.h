// SPDX-License-Identifier: MIT
// Errors of a device module as the library's own.
#pragma once

#include <algorithm>
#include <string>

#include "lib/base/status.h"
#include "lib/machine/device_ref.h"

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

// call_device(device, &DeviceTable::copy, to, from, bytes, stream)
template <typename... Parameters, typename... Arguments>
Status call_device(const Device& device, int32_t (*DeviceTable::*function)(void*, Parameters...), Arguments... arguments) {
  DeviceError error;
  return device_status((device.table->*function)(device.self, arguments..., &error), error);
}

// Whether calls on the stream are recorded, not run.
inline Status is_capturing(const Device& device, void* stream, bool* captures) {
  int32_t is = 0;
  TANDEM_TRY(call_device(device, &DeviceTable::capturing, stream, &is));
  *captures = is != 0;
  return {};
}

}  // namespace tandem
