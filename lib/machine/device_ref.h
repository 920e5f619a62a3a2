// SPDX-License-Identifier: MIT
// A device of an engine, as its users see it.
#pragma once

#include <cstdint>

#include "lib/tables/device.h"

namespace tandem {

class Bus;

struct Device {
  const DeviceTable* table = nullptr;
  void* self = nullptr;
  int32_t idx = 0;  // index among the module's devices
  DeviceInfo info;
  Bus* bus = nullptr;  // the engine's bus
};

}  // namespace tandem
