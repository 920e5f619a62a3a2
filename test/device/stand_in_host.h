// SPDX-License-Identifier: MIT
// A program that uses the stand-in. It owns a device and its memory, and asserts at its end that the stand-in found no
// fault.
#pragma once

#include <dlfcn.h>

#include <cstring>
#include <vector>

#include "device/stand_in.h"
#include "with_cmocka.h"

namespace stand_in {

template <typename Function>
Function find_function(const char* name) {
  void* module = dlopen(STAND_IN_MODULES "/libtandem-standin.so", RTLD_NOW | RTLD_LOCAL);
  if (module == nullptr) fail_msg("%s", dlerror());
  return reinterpret_cast<Function>(dlsym(module, name));
}

struct Shared {
  std::byte *host = nullptr, *device = nullptr;
};

class Host {
 public:
  Host() {
    controls.reset();
    assert_int_equal(table.open(0, &self, &error), TANDEM_OK);
  }
  Host(const Host&) = delete;
  ~Host() {
    for (void* data : blocks_) table.release(self, data);
    for (void* data : shared_) table.release_shared(self, data);
    table.close(self);
    assert_string_equal(controls.fault(), "");
    controls.reset();
  }

  std::byte* allocate(int64_t bytes) {
    void* data = nullptr;
    expect_ok(table.allocate(self, bytes, &data, &error));
    assert_int_equal(reinterpret_cast<uintptr_t>(data) % 256, 0);
    blocks_.push_back(data);
    return static_cast<std::byte*>(data);
  }
  // Copies the values to new device memory.
  template <typename T>
  T* upload(const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    std::byte* data = allocate(bytes + 1);
    expect_ok(table.copy(self, data, values.data(), bytes, nullptr, &error));
    expect_ok(wait());
    return reinterpret_cast<T*>(data);
  }
  Shared share(int64_t bytes) {
    void *host = nullptr, *device = nullptr;
    expect_ok(table.allocate_shared(self, bytes, &host, &device, &error));
    shared_.push_back(host);
    return {static_cast<std::byte*>(host), static_cast<std::byte*>(device)};
  }
  int32_t wait(void* stream = nullptr) { return table.wait(self, stream, &error); }

  void expect_ok(int32_t status) const {
    if (status != TANDEM_OK) fail_msg("%d: %s", status, error.message);
  }
  // Asserts the status, and that the message contains the text.
  void expect_refused(int32_t status, int32_t wanted, const char* text) const {
    if (status != wanted || error.code != wanted || std::strstr(error.message, text) == nullptr)
      fail_msg("%d: \"%s\" instead of %d: \"%s\"", status, error.message, wanted, text);
  }
  // Asserts that the stream ends with a fault of this text, and clears the fault.
  void expect_fault(const char* text, void* stream = nullptr) {
    expect_refused(wait(stream), TANDEM_ERROR_INTERNAL, text);
    assert_string_equal(controls.fault(), error.message);
    controls.reset();
  }

  const tandem::DeviceTable& table = *find_function<tandem::DeviceEntryFn>(tandem::kDeviceEntry)(tandem::kDeviceAbi);
  const Controls& controls = *find_function<ControlsFn>(kControlsSymbol)();
  const Counts& counts = *find_function<CountsFn>(kCountsSymbol)();
  void* self = nullptr;
  tandem::DeviceError error;

 private:
  std::vector<void*> blocks_, shared_;
};

}  // namespace stand_in
