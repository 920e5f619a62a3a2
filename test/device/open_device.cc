// SPDX-License-Identifier: MIT
#include "device/open_device.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace tandem::test {

OpenDevice::OpenDevice(const char* path) {
  void* module = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  const auto entry = module == nullptr ? nullptr : reinterpret_cast<DeviceEntryFn>(dlsym(module, kDeviceEntry));
  table = entry == nullptr ? nullptr : entry(kDeviceAbi);
  if (table == nullptr) {
    std::fprintf(stderr, "%s: %s\n", path, module == nullptr ? dlerror() : "no device module");
    std::exit(1);
  }
  DeviceError error;
  const int32_t n = table->n_devices(&error);
  if (n < 0) must(TANDEM_ERROR_BACKEND, error);
  for (int32_t i = 0; i < n && self == nullptr; ++i) {
    table->describe(i, &info);
    if (info.refusal[0] == '\0') must(table->open(i, &self, &error), error);
  }
  if (self != nullptr) return;
  std::fprintf(stderr, "no usable device\n");
  std::exit(1);
}

OpenDevice::~OpenDevice() { table->close(self); }

void OpenDevice::must(int32_t code, const DeviceError& error) const {
  if (code == TANDEM_OK) return;
  std::fprintf(stderr, "device: %s (status %d)\n", error.message, code);
  std::exit(1);
}

void* OpenDevice::allocate(int64_t bytes) const {
  DeviceError error;
  void* data = nullptr;
  must(table->allocate(self, std::max<int64_t>(bytes, 1), &data, &error), error);
  must(table->fill(self, data, 0xff, bytes, nullptr, &error), error);
  return data;
}

void OpenDevice::upload(void* to, const void* from, int64_t bytes) const {
  DeviceError error;
  must(table->copy(self, to, from, bytes, nullptr, &error), error);
  wait();
}

void OpenDevice::download(void* to, const void* from, int64_t bytes) const { upload(to, from, bytes); }

void OpenDevice::wait() const {
  DeviceError error;
  must(table->wait(self, nullptr, &error), error);
}

}  // namespace tandem::test
