// SPDX-License-Identifier: MIT
#include "lib/machine/device_memory.h"

#include "lib/base/process_end.h"
#include "lib/machine/device_status.h"

namespace tandem {
namespace {

// A lost device cannot allocate either, but the error must say that it is lost.
Status take_on_device(int64_t bytes, void** data, void* user) {
  const auto& device = *static_cast<const Device*>(user);
  DeviceError error;
  const int32_t code = device.table->allocate(device.self, bytes, data, &error);
  if (code != TANDEM_ERROR_OUT_OF_MEMORY) return device_status(code, error);
  return fail_with(code, error.underlying, "",
                   "no memory for " + std::to_string(bytes) + " bytes: device: " + reason_of(error));
}

void release_on_device(void* data, size_t, void* user) {
  const auto& device = *static_cast<const Device*>(user);
  if (!process_ends()) device.table->release(device.self, data);
}

}  // namespace

Allocator device_allocator(const Device* device) {
  return {nullptr, release_on_device, const_cast<Device*>(device), take_on_device};
}

bool owns_pages(const Tier& tier, const Buffer& buffer) {
  const bool begins = reinterpret_cast<uintptr_t>(buffer.data()) % kPageBytes == 0;
  return begins && (tier.maps() || buffer.bytes() % kPageBytes == 0);
}

}  // namespace tandem
