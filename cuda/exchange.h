// SPDX-License-Identifier: MIT
// append(), merge(), observe() and small copies: what is refused, which grid. The device is current in every call; any
// thread.
#pragma once

#include "cuda/driver.h"
#include "cuda/exchange_call.h"

namespace tandem::cuda {

// Has the kernels on the device before the first call: loading one later might have to wait for a merge that waits.
int32_t load_exchange_kernels(DeviceError* error);
int32_t load_observe_kernels(DeviceError* error);
// Which compute capability's code the device runs: 90 is 9.0. What it has compiled for itself counts as what it is made of.
int32_t find_code_version(int32_t* version, DeviceError* error);
// On which stream, and of what device.
struct LaunchOn {
  cudaStream_t stream = nullptr;
  int32_t capability = 0;  // of the code that the device runs: 90 is 9.0
  int32_t n_multiprocessors = 0;
  int32_t of_cluster = 1;    // blocks
  int32_t shared_bytes = 0;  // of a block: dynamic
  bool has_90a = false;      // the device runs code that is for 9.0 alone
};
// A little from pinned memory to the device's, past what the copy engine has to do (kernels/upload.cuh).
bool may_upload(const void* to, const void* from, int64_t bytes);
int32_t launch_upload(void* to, const void* from, int64_t bytes, const LaunchOn& on, DeviceError* error);
// Whether attention may run beside the append: it has an epoch, the device runs code for 9.0, no rows are rotated, the layer
// keeps no hidden states, the call names no keys, K is not f32 (no kernel for f32 runs beside an append), and there are few
// rows: up to 128 KiB of K and V of up to 512 tokens where they are copied as they are, else up to 64 rows of q, K and V.
bool runs_beside(const DeviceAppend& call, int32_t capability);
// How many multiprocessors such an append takes.
int32_t append_blocks(const DeviceAppend& call);
// The word in which such an append writes its epoch once the window has its rows.
const int64_t* rows_written(const DeviceExchange& exchange);
int32_t launch_append(const DeviceAppend& call, const LaunchOn& on, DeviceError* error);
int32_t launch_accumulate(const DeviceAccumulate& call, const LaunchOn& on, DeviceError* error);
int32_t launch_merge(const DeviceMerge& call, const LaunchOn& on, DeviceError* error);
int32_t launch_observe(const DeviceObserve& call, const LaunchOn& on, DeviceError* error);
int32_t launch_name_keys(const DeviceNamedKeys& call, const LaunchOn& on, DeviceError* error);

Rotation rotation_of(const RopeTable& table, const float* cos_sin);
int32_t check_rows(const DeviceRows& rows, const char* field, DeviceError* error);
int32_t check_exchange(const DeviceExchange& exchange, DeviceError* error);

// Of kernels that begin with begin_behind().
template <class Call>
int32_t launch_kernel(void (*kernel)(Call), dim3 n_blocks, int n_warps, const Call& call, const LaunchOn& on,
                      DeviceError* error) {
  Call copy = call;
  void* arguments[] = {&copy};
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(on.of_cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = n_blocks;
  config.blockDim = dim3(32 * static_cast<unsigned>(n_warps));
  config.dynamicSmemBytes = static_cast<size_t>(on.shared_bytes);
  config.stream = on.stream;
  config.attrs = attributes;
  config.numAttrs = on.capability < 90 ? 0 : on.of_cluster > 1 ? 2 : 1;
  TANDEM_CUDA_TRY(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments), error);
  return TANDEM_OK;
}

}  // namespace tandem::cuda
