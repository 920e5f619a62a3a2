// SPDX-License-Identifier: MIT
// The stand-in as the core's Device, and its memory as a Tier.
#pragma once

#include "device/stand_in_host.h"
#include "lib/base/memory.h"
#include "lib/machine/device_owner.h"

namespace stand_in {

using tandem::Device;
using tandem::DeviceError;
using tandem::Tier;

struct OnStandIn {
  Host host;
  Device device{&host.table, host.self, 0, {}};
  Tier tier{"device_cap_bytes", 0, {allocate, release, &device}};

  static void* allocate(size_t bytes, size_t, void* user) {
    const auto& on = *static_cast<const Device*>(user);
    DeviceError error;
    void* data = nullptr;
    return on.table->allocate(on.self, static_cast<int64_t>(bytes), &data, &error) == TANDEM_OK ? data : nullptr;
  }
  static void release(void* data, size_t, void* user) {
    const auto& on = *static_cast<const Device*>(user);
    on.table->release(on.self, data);
  }
};

}  // namespace stand_in
