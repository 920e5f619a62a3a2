// SPDX-License-Identifier: MIT
// Memory of a device for programs on the C ABI, which link no CUDA: the driver's library, libcuda.so.1, is opened when the
// first device is.
//
// Buffers are of the device's primary context. libtandem-cuda.so computes in it, too, so its calls take them as they are.
// They are used by the thread that has opened the device.
#pragma once

#include <cstdint>
#include <memory>

#include "tools/common/result.h"

namespace tools {

struct DriverFunctions;

class DeviceMemory {
 public:
  // device_idx: as the engine's report and tandem_tensor count devices.
  static Result open(int32_t device_idx, std::unique_ptr<DeviceMemory>* device);
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();

  Result wait() const;  // until the device has finished all that it has been given
  int32_t device_idx() const { return device_idx_; }

 private:
  friend class DeviceBuffer;
  DeviceMemory(int32_t device_idx, std::unique_ptr<DriverFunctions> driver);

  int32_t device_idx_;
  int device_ = -1;  // as the driver names it; -1: its context is not retained
  std::unique_ptr<DriverFunctions> driver_;
};

// Goes before the DeviceMemory that it is of.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();

  static Result create(const DeviceMemory* device, int64_t bytes, DeviceBuffer* buffer);
  // The whole buffer; both wait.
  Result upload(const void* from) const;
  Result download(void* to) const;
  void* data() const { return data_; }  // NULL: there is no buffer

 private:
  const DeviceMemory* device_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace tools
