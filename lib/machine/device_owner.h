// SPDX-License-Identifier: MIT
// The device of an engine: found in a module, opened, closed with its owner.
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
  // The first device of the backend's module that can be used. Errors: those of open_device_module(), BACKEND (there is no
  // such device, with the reason of each, or it could not be opened).
  static Status open(const char* backend, const char* path, std::unique_ptr<DeviceOwner>* owner);
  DeviceOwner() = default;
  DeviceOwner(const DeviceOwner&) = delete;
  ~DeviceOwner();

  const Device& device() const { return device_; }
  const char* backend() const { return module_.table->name; }
  // For the engine report: every device of the module, and the module with what was tried before it.
  std::string devices_json() const;
  std::string module_json() const;

 private:
  Status list_devices();
  Status open_first();

  DeviceModule module_;
  std::vector<DeviceInfo> infos_;
  size_t device_idx_ = 0;
  Bus bus_;
  Device device_;  // table: null until it is open
};

}  // namespace tandem
