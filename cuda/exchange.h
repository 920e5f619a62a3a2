// SPDX-License-Identifier: MIT
// append(), merge() and observe(): what is refused, which grid. The device is current in every call; any thread.
#pragma once

#include "cuda/driver.h"

namespace tandem::cuda {

// Has the kernels on the device before the first call: loading one later might have to wait for a merge that waits.
int32_t load_exchange_kernels(DeviceError* error);
int32_t load_observe_kernels(DeviceError* error);
int32_t launch_append(const DeviceAppend& call, cudaStream_t stream, DeviceError* error);
int32_t launch_accumulate(const DeviceAccumulate& call, cudaStream_t stream, DeviceError* error);
int32_t launch_merge(const DeviceMerge& call, cudaStream_t stream, DeviceError* error);
int32_t launch_observe(const DeviceObserve& call, int32_t n_multiprocessors, cudaStream_t stream, DeviceError* error);

int32_t check_rows(const DeviceRows& rows, const char* field, DeviceError* error);
int32_t check_exchange(const DeviceExchange& exchange, DeviceError* error);

template <class Call>
int32_t launch_kernel(void (*kernel)(Call), dim3 n_blocks, int n_warps, const Call& call, cudaStream_t stream,
                      DeviceError* error) {
  Call copy = call;
  void* arguments[] = {&copy};
  TANDEM_CUDA_TRY(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), n_blocks,
                                   dim3(32 * static_cast<unsigned>(n_warps)), arguments, 0, stream),
                  error);
  return TANDEM_OK;
}

}  // namespace tandem::cuda
