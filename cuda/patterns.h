// SPDX-License-Identifier: MIT
// pattern_bytes(), index_patterns() and list_patterns(): refuses calls that no kernel serves, and chooses grids. The device
// is current in every call. Any thread may call.
#pragma once

#include "cuda/exchange.h"
#include "cuda/pattern_call.h"

namespace tandem::cuda {

// Loads the kernels onto the device before the first call, and raises their limits of shared memory.
int32_t load_pattern_kernels(bool has_90a, DeviceError* error);
int64_t pattern_workspace_bytes(const DevicePatterns& call);
int32_t launch_index_patterns(const DevicePatterns& call, const LaunchOn& on, DeviceError* error);
int32_t launch_list_patterns(const DevicePatterns& call, const LaunchOn& on, DeviceError* error);

}  // namespace tandem::cuda
