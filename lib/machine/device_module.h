// SPDX-License-Identifier: MIT
// Finds and opens the module of a device backend: libtandem-<name>.so, a shared object with a table of lib/tables/device.h.
//
// Opening a file runs what is in it, so the places are few, and none depends on where the process happens to stand:
//
//   1. the path that the caller gives, and then no other
//   2. the folders of $TANDEM_BACKEND_PATH, unless the process has rights that whoever set the variable may lack
//   3. the folder of the file that holds this code: libtandem.so, or the program that links the archive
//   4. the folder of an installation's modules, fixed when this file is compiled
//
// The first module that can be used is taken; why those before it were not is kept for the report. A module that was opened
// stays, used or not: what it started may still run its code.
#pragma once

#include <string>
#include <vector>

#include "lib/base/status.h"
#include "lib/tables/device.h"

namespace tandem {

struct DeviceModule {
  const DeviceTable* table = nullptr;
  std::string path;
  std::vector<std::string> refused;  // "path: reason" of every place before it
};

// path: null, or a file. Errors: INVALID_ARGUMENT (no name of a backend, no absolute path), BACKEND (every path tried, with
// its reason).
Status open_device_module(const char* name, const char* path, DeviceModule* module);

// Why a table cannot serve as that backend's; "" where it can.
std::string table_refusal(const DeviceTable* table, const char* name);

}  // namespace tandem
