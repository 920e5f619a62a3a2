// SPDX-License-Identifier: MIT
// Finds and opens the module of a device backend: libtandem-<name>.so, a shared object with a table of lib/tables/device.h.
//
// Opening a file runs its code. So modules are searched for in few places, and none depends on the current directory:
//
//   1. the path that the caller gives, and then no other
//   2. the folders of $TANDEM_BACKEND_PATH, unless the process has rights that the user who set the variable may lack
//   3. the folder of the file that holds this code: libtandem.so, or the program that links the archive
//   4. the folder of an installation's modules, fixed when this file is compiled
//
// The first usable module is taken. The report keeps why earlier modules were refused. An opened module stays open, used or
// not: threads that it started may still run its code.
#pragma once

#include <string>
#include <vector>

#include "lib/base/status.h"
#include "lib/tables/device.h"

namespace tandem {

struct DeviceModule {
  const DeviceTable* table = nullptr;
  std::string path;
  std::vector<std::string> refused;  // "path: reason" for each place tried before
};

// path: null, or a file. Errors: INVALID_ARGUMENT (not a backend's name, not an absolute path), BACKEND (every path that was
// tried, with its reason).
Status open_device_module(const char* name, const char* path, DeviceModule* module);

// Returns why the table cannot serve as that backend's, or "" if it can.
std::string table_refusal(const DeviceTable* table, const char* name);

}  // namespace tandem
