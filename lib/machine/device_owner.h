// SPDX-License-Identifier: MIT
// The device of an engine. The owner finds it in a module, opens it and closes it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lib/machine/bus.h"
#include "lib/machine/device_module.h"
#include "lib/machine/device_ref.h"

namespace tandem {

class DeviceOwner {
 public:
  // Opens the first usable device of the backend's module. Errors: those of open_device_module(), and BACKEND (no usable
  // device, with the reason for each, or opening failed).
  static Status open(const char* backend, const char* path, std::unique_ptr<DeviceOwner>* owner);
  DeviceOwner() = default;
  DeviceOwner(const DeviceOwner&) = delete;
  ~DeviceOwner();

  const Device& device() const { return device_; }
  const char* backend() const { return module_.table->name; }
  // For the engine report: all devices of the module; the module and the places tried before it.
  std::string devices_json() const;
  std::string module_json() const;

 private:
  Status list_devices();
  Status open_first();

  DeviceModule module_;
  std::vector<DeviceInfo> infos_;
  size_t device_idx_ = 0;
  Bus bus_;
  Device device_;  // table is null until the device is open
};

}  // namespace tandem
