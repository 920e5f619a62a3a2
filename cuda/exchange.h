// SPDX-License-Identifier: MIT
// append(), merge(), observe() and small copies: refuses calls that no kernel serves, and chooses grids. The device is
// current in every call. Any thread may call.
#pragma once

#include "cuda/driver.h"
#include "cuda/exchange_call.h"

namespace tandem::cuda {

// Loads the kernels onto the device before the first call. Loading a kernel later could block behind a merge that waits for
// the host.
int32_t load_exchange_kernels(DeviceError* error);
int32_t load_observe_kernels(DeviceError* error);
// Finds the compute capability of the code that the device runs: 90 is 9.0. Code that the driver compiled from PTX counts
// as the version of that PTX.
int32_t find_code_version(int32_t* version, DeviceError* error);
// The stream and the device of a launch.
struct LaunchOn {
  cudaStream_t stream = nullptr;
  int32_t capability = 0;  // compute capability of the code that the device runs: 90 is 9.0
  int32_t n_multiprocessors = 0;
  int32_t of_cluster = 1;    // blocks of a cluster
  int32_t shared_bytes = 0;  // dynamic shared memory of a block
  bool has_90a = false;      // the device runs code for 9.0 alone (90a)
};
// True if launch_upload() may make this copy, from pinned host memory to the device. Such small copies do not queue behind
// the work of the copy engine (kernels/upload.cuh).
bool may_upload(const void* to, const void* from, int64_t bytes);
int32_t launch_upload(void* to, const void* from, int64_t bytes, const LaunchOn& on, DeviceError* error);
// True if attention may run beside the append. The append has an epoch and the device runs code for 9.0. No rows are
// rotated, the layer keeps no hidden states, the call names no keys, and K is not f32 (no kernel for f32 runs beside an
// append). The rows are few: up to 128 KiB of K and V of up to 512 tokens where rows are copied as they are, else up to 64
// rows of q, K and V.
bool runs_beside(const DeviceAppend& call, int32_t capability);
// Returns the number of multiprocessors that such an append takes.
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

// Launches a kernel that begins with begin_behind().
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
