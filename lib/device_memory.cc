// SPDX-License-Identifier: MIT
#include "lib/device_memory.h"

#include "lib/process_end.h"

namespace tandem {
namespace {

void* allocate_on_device(size_t bytes, size_t, void* user) {
  const auto& device = *static_cast<const Device*>(user);
  DeviceError error;
  void* data = nullptr;
  const int32_t code = device.table->allocate(device.self, static_cast<int64_t>(bytes), &data, &error);
  return code == TANDEM_OK ? data : nullptr;
}

void release_on_device(void* data, size_t, void* user) {
  const auto& device = *static_cast<const Device*>(user);
  if (!process_ends()) device.table->release(device.self, data);
}

}  // namespace

Allocator device_allocator(const Device* device) {
  return {allocate_on_device, release_on_device, const_cast<Device*>(device)};
}

bool owns_pages(const Tier& tier, const Buffer& buffer) {
  const bool begins = reinterpret_cast<uintptr_t>(buffer.data()) % kPageBytes == 0;
  return begins && (tier.maps() || buffer.bytes() % kPageBytes == 0);
}

}  // namespace tandem
