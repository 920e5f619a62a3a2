// SPDX-License-Identifier: MIT
// The module's table: devices, their memory, their kernels.
#include <cstring>
#include <new>

#include "cuda/attend_launch.h"
#include "cuda/driver.h"

namespace tandem::cuda {
namespace {

constexpr int kLeastCapability = 80;

struct Device {
  int idx;
  AttendLauncher launcher;
};

Device& device_of(void* self) { return *static_cast<Device*>(self); }

int32_t n_devices(DeviceError* error) {
  int n = 0;
  const cudaError_t result = cudaGetDeviceCount(&n);
  if (result == cudaSuccess) return n;
  cudaGetLastError();
  fail(error, TANDEM_ERROR_BACKEND, result, "", "cudaGetDeviceCount: %s (%s)", cudaGetErrorString(result),
       cudaGetErrorName(result));
  return -1;
}

void describe(int32_t device_idx, DeviceInfo* info) {
  *info = {};
  cudaDeviceProp properties;
  const cudaError_t result = cudaGetDeviceProperties(&properties, device_idx);
  if (result != cudaSuccess) {
    cudaGetLastError();
    std::snprintf(info->refusal, sizeof info->refusal, "cudaGetDeviceProperties: %s", cudaGetErrorString(result));
    return;
  }
  std::snprintf(info->name, sizeof info->name, "%s", properties.name);
  info->memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  info->n_multiprocessors = properties.multiProcessorCount;
  info->compute_capability = 10 * properties.major + properties.minor;
  if (info->compute_capability < kLeastCapability)
    std::snprintf(info->refusal, sizeof info->refusal, "compute capability %d.%d is below %d.%d", properties.major,
                  properties.minor, kLeastCapability / 10, kLeastCapability % 10);
  int mode = cudaComputeModeDefault;
  if (cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, device_idx) == cudaSuccess && mode == cudaComputeModeProhibited)
    std::snprintf(info->refusal, sizeof info->refusal, "its compute mode forbids it");
}

int32_t open(int32_t device_idx, void** self, DeviceError* error) {
  DeviceInfo info;
  describe(device_idx, &info);
  if (info.refusal[0] != '\0')
    return fail(error, TANDEM_ERROR_BACKEND, 0, "device", "device %d: %s", device_idx, info.refusal);
  const OnDevice on(device_idx);
  TANDEM_CUDA_TRY(on.result(), error);
  TANDEM_CUDA_TRY(cudaFree(nullptr), error);  // makes the context
  int of_block = 0, of_multiprocessor = 0;
  TANDEM_CUDA_TRY(cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_idx), error);
  TANDEM_CUDA_TRY(cudaDeviceGetAttribute(&of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_idx),
                  error);
  auto* device = new (std::nothrow)
      Device{device_idx, AttendLauncher({info.compute_capability, info.n_multiprocessors, of_block, of_multiprocessor})};
  if (device == nullptr) return fail(error, TANDEM_ERROR_OUT_OF_MEMORY, 0, "", "no memory for a device");
  *self = device;
  return TANDEM_OK;
}

void close(void* self) { delete &device_of(self); }

int32_t allocate(void* self, int64_t bytes, void** data, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  TANDEM_CUDA_TRY(cudaMalloc(data, static_cast<size_t>(bytes)), error);
  return TANDEM_OK;
}

void release(void* self, void* data) {
  const OnDevice on(device_of(self).idx);
  cudaFree(data);
}

int32_t copy(void* self, void* to, const void* from, int64_t bytes, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  TANDEM_CUDA_TRY(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, static_cast<cudaStream_t>(stream)), error);
  return TANDEM_OK;
}

int32_t fill(void* self, void* data, int32_t byte, int64_t bytes, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  TANDEM_CUDA_TRY(cudaMemsetAsync(data, byte, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)), error);
  return TANDEM_OK;
}

int32_t wait(void* self, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  TANDEM_CUDA_TRY(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), error);
  return TANDEM_OK;
}

int32_t supports(void* self, const Layer* layer, int32_t max_q_len, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return device_of(self).launcher.supports(*layer, max_q_len, error);
}

int64_t workspace_bytes(void* self, const DeviceAttend* call) {
  const OnDevice on(device_of(self).idx);
  return device_of(self).launcher.workspace_bytes(*call);
}

int32_t attend(void* self, const DeviceAttend* call, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return device_of(self).launcher.launch(*call, static_cast<cudaStream_t>(stream), error);
}

int32_t allocate_shared(void*, int64_t, void**, void**, DeviceError* error) {
  return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "", "not yet");
}
void release_shared(void*, void*) {}
int32_t check_device(void*, DeviceError*) { return TANDEM_OK; }
int32_t capturing(void*, void*, int32_t* is_capturing, DeviceError*) {
  *is_capturing = 0;
  return TANDEM_OK;
}
int32_t append(void*, const DeviceAppend*, void*, DeviceError* error) {
  return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "", "not yet");
}
int32_t merge(void*, const DeviceMerge*, void*, DeviceError* error) {
  return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "", "not yet");
}

constexpr DeviceTable kTable = {
    kDeviceAbi,
    sizeof(DeviceTable),
    "cuda",
    n_devices,
    describe,
    open,
    close,
    allocate,
    release,
    copy,
    fill,
    wait,
    allocate_shared,
    release_shared,
    check_device,
    capturing,
    supports,
    workspace_bytes,
    append,
    attend,
    merge,
};

}  // namespace
}  // namespace tandem::cuda

extern "C" __attribute__((visibility("default"))) const tandem::DeviceTable* tandem_device_module(uint32_t abi) {
  return abi == tandem::kDeviceAbi ? &tandem::cuda::kTable : nullptr;
}
