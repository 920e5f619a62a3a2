// SPDX-License-Identifier: MIT
// Device memory for programs on the C ABI that do not link CUDA. The first device that is opened loads the driver's library,
// libcuda.so.1.
//
// Buffers belong to the device's primary context. libtandem-cuda.so computes in it, too, so its calls take the buffers
// directly. Only the thread that has opened the device may use them.
#pragma once

#include <cstdint>
#include <memory>

#include "tools/common/result.h"

namespace tools {

struct DriverFunctions;

class DeviceMemory {
 public:
  // device_idx: the index of the device in the engine's report and in tandem_tensor.
  static Result open(int32_t device_idx, std::unique_ptr<DeviceMemory>* device);
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();

  Result wait() const;  // until the device has finished all of its work
  int32_t device_idx() const { return device_idx_; }

 private:
  friend class DeviceBuffer;
  DeviceMemory(int32_t device_idx, std::unique_ptr<DriverFunctions> driver);

  int32_t device_idx_;
  int device_ = -1;  // the driver's number; -1: its context is not retained
  std::unique_ptr<DriverFunctions> driver_;
};

// A buffer must be destroyed before its DeviceMemory.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();

  static Result create(const DeviceMemory* device, int64_t bytes, DeviceBuffer* buffer);
  // Copy the whole buffer and wait.
  Result upload(const void* from) const;
  Result download(void* to) const;
  void* data() const { return data_; }  // NULL: no buffer

 private:
  const DeviceMemory* device_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace tools
