// SPDX-License-Identifier: MIT
// A device of a module that is opened by its file's name, for tests and benches.
#pragma once

#include "lib/tables/device.h"

namespace tandem::test {

// Opens the first usable device. Ends the program if the module has none.
class OpenDevice {
 public:
  explicit OpenDevice(const char* path);
  ~OpenDevice();
  OpenDevice(const OpenDevice&) = delete;

  const DeviceTable* table = nullptr;
  void* self = nullptr;
  DeviceInfo info;

  void* allocate(int64_t bytes) const;  // filled with 0xff, which is NaN in every type
  void release(void* data) const { table->release(self, data); }
  void upload(void* to, const void* from, int64_t bytes) const;
  void download(void* to, const void* from, int64_t bytes) const;
  void wait() const;
  void must(int32_t code, const DeviceError& error) const;
};

}  // namespace tandem::test
