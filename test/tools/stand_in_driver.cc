// SPDX-License-Identifier: MIT
// A libcuda.so.1 for programs whose tensors are in the memory of the stand-in. Programs find it through LD_LIBRARY_PATH,
// like a driver. Its functions answer like CUDA's driver, but return memory of the stand-in, which accepts no other.
//
//   TANDEM_TEST_DRIVER    "cuMemAlloc_v2": that function fails; "nan": downloaded data has a NaN;
//                         "delay": each operation of a stream takes kDelayNs
//
// When a program releases the context, memory that it has not freed is reported on stderr.
#include "tools/stand_in_driver.h"

#include <dlfcn.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string_view>

#include "device/open_device.h"
#include "device/stand_in.h"

namespace {

using tandem::test::OpenDevice;
using Address = unsigned long long;
constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidDevice = 101,
              kInvalidContext = 201;

struct Driver {
  bool is_initialized = false, is_current = false;
  std::unique_ptr<OpenDevice> device;
  std::set<Address> buffers;
};
Driver driver;

std::string_view wanted() {
  const char* value = std::getenv("TANDEM_TEST_DRIVER");
  return value != nullptr ? value : "";
}

bool is_usable() { return driver.is_initialized && driver.device != nullptr && driver.is_current; }

void* pointer(Address data) { return reinterpret_cast<void*>(static_cast<uintptr_t>(data)); }

void delay_operations() {
  void* module = dlopen(STAND_IN_MODULE, RTLD_NOW | RTLD_LOCAL);
  const auto controls = reinterpret_cast<stand_in::ControlsFn>(dlsym(module, stand_in::kControlsSymbol));
  controls()->set_delay(kDelayNs);
}

}  // namespace

extern "C" {

#define EXPORTED __attribute__((visibility("default"))) int

EXPORTED cuInit(unsigned flags) {
  driver.is_initialized = flags == 0;
  return flags == 0 ? kSuccess : kInvalidValue;
}

EXPORTED cuDeviceGet(int* device, int ordinal) {
  if (!driver.is_initialized) return kNotInitialized;
  if (ordinal != 0) return kInvalidDevice;
  *device = 40 + ordinal;
  return kSuccess;
}

EXPORTED cuDevicePrimaryCtxRetain(void** context, int device) {
  if (!driver.is_initialized) return kNotInitialized;
  if (device != 40) return kInvalidDevice;
  driver.device = std::make_unique<OpenDevice>(STAND_IN_MODULE);
  if (wanted() == "delay") delay_operations();
  *context = driver.device.get();
  return kSuccess;
}

EXPORTED cuDevicePrimaryCtxRelease_v2(int device) {
  if (device != 40 || driver.device == nullptr) return kInvalidDevice;
  if (!driver.buffers.empty()) std::fprintf(stderr, "buffers that are left: %zu\n", driver.buffers.size());
  std::fputs("the context is given back\n", stderr);
  driver.device.reset();
  return kSuccess;
}

EXPORTED cuCtxSetCurrent(void* context) {
  driver.is_current = context != nullptr && context == driver.device.get();
  return driver.is_current ? kSuccess : kInvalidContext;
}

EXPORTED cuCtxSynchronize() {
  if (!is_usable()) return kInvalidContext;
  driver.device->wait();
  return kSuccess;
}

EXPORTED cuMemAlloc_v2(Address* data, size_t bytes) {
  if (!is_usable()) return kInvalidContext;
  if (wanted() == "cuMemAlloc_v2") return kOutOfMemory;
  if (bytes == 0) return kInvalidValue;
  *data = reinterpret_cast<uintptr_t>(driver.device->allocate(static_cast<int64_t>(bytes)));
  driver.buffers.insert(*data);
  return kSuccess;
}

EXPORTED cuMemFree_v2(Address data) {
  if (!is_usable()) return kInvalidContext;
  if (driver.buffers.erase(data) == 0) return kInvalidValue;
  driver.device->release(pointer(data));
  return kSuccess;
}

EXPORTED cuMemcpyHtoD_v2(Address to, const void* from, size_t bytes) {
  if (!is_usable()) return kInvalidContext;
  driver.device->upload(pointer(to), from, static_cast<int64_t>(bytes));
  return kSuccess;
}

EXPORTED cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
  if (!is_usable()) return kInvalidContext;
  driver.device->download(to, pointer(from), static_cast<int64_t>(bytes));
  if (wanted() == "nan") std::memset(to, 0xff, 4);
  return kSuccess;
}

EXPORTED cuGetErrorName(int code, const char** name) {
  *name = code == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : nullptr;
  return *name != nullptr ? kSuccess : kInvalidValue;
}

}  // extern "C"
