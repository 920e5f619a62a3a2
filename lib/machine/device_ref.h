// SPDX-License-Identifier: MIT
// A device of an engine, as those see it who ask it for anything.
#pragma once

#include <cstdint>

#include "lib/tables/device.h"

namespace tandem {

class Bus;

struct Device {
  const DeviceTable* table = nullptr;
  void* self = nullptr;
  int32_t idx = 0;  // among the module's devices
  DeviceInfo info;
  Bus* bus = nullptr;  // the engine's
};

}  // namespace tandem
