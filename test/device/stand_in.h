// SPDX-License-Identifier: MIT
// A device module without a device: its memory is the host's, its streams run at once, and attend() follows lib/device.h in
// double precision. It checks what it is handed as no device can. Compiled once as it should be and once for each way in
// which a module is of no use.
#pragma once

#include <atomic>
#include <cstdint>

#include "lib/device.h"

namespace stand_in {

inline constexpr char kName[] = "standin";
inline constexpr int64_t kWorkspaceBytes = 256;

// What the core has asked of the module since it was loaded.
struct Counts {
  std::atomic<int64_t> n_opened{0}, n_closed{0};
  std::atomic<int64_t> n_allocated{0}, n_released{0};
  std::atomic<int64_t> n_attended{0};
};

// Exported by every module of these; dlsym() finds it by this name.
inline constexpr char kCountsSymbol[] = "stand_in_counts";
using CountsFn = const Counts* (*)();

// "" or why the call is not one that lib/device.h allows; then nothing is written.
const char* attend(const tandem::DeviceAttend& call);

}  // namespace stand_in
