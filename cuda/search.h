// SPDX-License-Identifier: MIT
// bound_chunks(), search_bytes() and search(): refuses calls that no kernel serves, and chooses grids. The device is
// current in every call. Any thread may call.
#pragma once

#include "cuda/exchange.h"
#include "cuda/search_call.h"

namespace tandem::cuda {

// Loads the kernels onto the device before the first call, and raises their limits of shared memory. has_90a: the device
// runs code for 9.0 alone.
int32_t load_search_kernels(bool has_90a, DeviceError* error);
int64_t search_workspace_bytes(const DeviceSearch& call, int32_t n_multiprocessors);
int32_t launch_search(const DeviceSearch& call, const LaunchOn& on, DeviceError* error);
int32_t launch_bound_chunks(const DeviceBoundChunks& call, const LaunchOn& on, DeviceError* error);

}  // namespace tandem::cuda
