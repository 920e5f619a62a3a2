// SPDX-License-Identifier: MIT
// append() and merge(): what is refused, which grid. The device is current in every call; any thread.
#pragma once

#include "cuda/driver.h"

namespace tandem::cuda {

// Has the kernels on the device before the first call: loading one later might have to wait for a merge that waits.
int32_t load_exchange_kernels(DeviceError* error);
int32_t launch_append(const DeviceAppend& call, cudaStream_t stream, DeviceError* error);
int32_t launch_merge(const DeviceMerge& call, cudaStream_t stream, DeviceError* error);

}  // namespace tandem::cuda
