// SPDX-License-Identifier: MIT
#include "tools/common/device_memory.h"

#include <dlfcn.h>

#include <utility>

namespace tools {

// The driver's functions of these names. They return 0 on success.
struct DriverFunctions {
  using Address = unsigned long long;
  int (*init)(unsigned flags);
  int (*get_device)(int* device, int ordinal);
  int (*retain_context)(void** context, int device);
  int (*release_context)(int device);
  int (*set_context)(void* context);
  int (*synchronize)();
  int (*allocate)(Address* data, size_t bytes);
  int (*free)(Address data);
  int (*upload)(Address to, const void* from, size_t bytes);
  int (*download)(void* to, Address from, size_t bytes);
  int (*error_name)(int code, const char** name);

  Result load();
  Result check(int code, const char* call) const;
};

namespace {

constexpr const char* kDriver = "libcuda.so.1";

DriverFunctions::Address address_of(const void* data) { return reinterpret_cast<uintptr_t>(data); }

template <typename Function>
Result find_function(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr ? Result() : refuse("%s: it has no %s", kDriver, name);
}

}  // namespace

// The library is never unloaded: a driver stays until the process ends.
Result DriverFunctions::load() {
  void* library = dlopen(kDriver, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return refuse("device memory needs CUDA's driver: %s", dlerror());
  TOOL_TRY(find_function(library, "cuInit", &init));
  TOOL_TRY(find_function(library, "cuDeviceGet", &get_device));
  TOOL_TRY(find_function(library, "cuDevicePrimaryCtxRetain", &retain_context));
  TOOL_TRY(find_function(library, "cuDevicePrimaryCtxRelease_v2", &release_context));
  TOOL_TRY(find_function(library, "cuCtxSetCurrent", &set_context));
  TOOL_TRY(find_function(library, "cuCtxSynchronize", &synchronize));
  TOOL_TRY(find_function(library, "cuMemAlloc_v2", &allocate));
  TOOL_TRY(find_function(library, "cuMemFree_v2", &free));
  TOOL_TRY(find_function(library, "cuMemcpyHtoD_v2", &upload));
  TOOL_TRY(find_function(library, "cuMemcpyDtoH_v2", &download));
  return find_function(library, "cuGetErrorName", &error_name);
}

Result DriverFunctions::check(int code, const char* call) const {
  if (code == 0) return {};
  const char* name = nullptr;
  const bool is_known = error_name(code, &name) == 0 && name != nullptr;
  return refuse("%s: %s: %s (%d)", kDriver, call, is_known ? name : "unknown error", code);
}

DeviceMemory::DeviceMemory(int32_t device_idx, std::unique_ptr<DriverFunctions> driver)
    : device_idx_(device_idx), driver_(std::move(driver)) {}

Result DeviceMemory::open(int32_t device_idx, std::unique_ptr<DeviceMemory>* device) {
  auto functions = std::make_unique<DriverFunctions>();
  TOOL_TRY(functions->load());
  const DriverFunctions& driver = *functions;
  std::unique_ptr<DeviceMemory> made(new DeviceMemory(device_idx, std::move(functions)));
  int of_driver = 0;
  void* context = nullptr;
  TOOL_TRY(driver.check(driver.init(0), "cuInit"));
  TOOL_TRY(driver.check(driver.get_device(&of_driver, device_idx), "cuDeviceGet"));
  TOOL_TRY(driver.check(driver.retain_context(&context, of_driver), "cuDevicePrimaryCtxRetain"));
  made->device_ = of_driver;
  TOOL_TRY(driver.check(driver.set_context(context), "cuCtxSetCurrent"));
  *device = std::move(made);
  return {};
}

DeviceMemory::~DeviceMemory() {
  if (device_ >= 0) driver_->release_context(device_);
}

Result DeviceMemory::wait() const { return driver_->check(driver_->synchronize(), "cuCtxSynchronize"); }

Result DeviceBuffer::create(const DeviceMemory* device, int64_t bytes, DeviceBuffer* buffer) {
  const DriverFunctions& driver = *device->driver_;
  DriverFunctions::Address address = 0;
  const std::string call = text("cuMemAlloc of %lld bytes", static_cast<long long>(bytes));
  TOOL_TRY(driver.check(driver.allocate(&address, static_cast<size_t>(bytes)), call.c_str()));
  DeviceBuffer made;
  made.device_ = device;
  made.data_ = reinterpret_cast<void*>(static_cast<uintptr_t>(address));
  made.bytes_ = bytes;
  *buffer = std::move(made);
  return {};
}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) device_->driver_->free(address_of(data_));
}

Result DeviceBuffer::upload(const void* from) const {
  const DriverFunctions& driver = *device_->driver_;
  TOOL_TRY(driver.check(driver.upload(address_of(data_), from, static_cast<size_t>(bytes_)), "cuMemcpyHtoD"));
  return device_->wait();
}

Result DeviceBuffer::download(void* to) const {
  const DriverFunctions& driver = *device_->driver_;
  return driver.check(driver.download(to, address_of(data_), static_cast<size_t>(bytes_)), "cuMemcpyDtoH");
}

}  // namespace tools
