// SPDX-License-Identifier: MIT
// bound_chunks(), search_bytes() and search(): what is refused, which grid. The device is current in every call; any thread.
#pragma once

#include "cuda/exchange.h"
#include "cuda/search_call.h"

namespace tandem::cuda {

// Has the kernels on the device before the first call, and lets them have the shared memory that they ask for.
// has_90a: the device runs code that is for 9.0 alone.
int32_t load_search_kernels(bool has_90a, DeviceError* error);
int64_t search_workspace_bytes(const DeviceSearch& call, int32_t n_multiprocessors);
int32_t launch_search(const DeviceSearch& call, const LaunchOn& on, DeviceError* error);
int32_t launch_bound_chunks(const DeviceBoundChunks& call, const LaunchOn& on, DeviceError* error);

}  // namespace tandem::cuda
