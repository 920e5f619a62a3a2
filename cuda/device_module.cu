// SPDX-License-Identifier: MIT
// The module's table: devices, their memory, their kernels.
#include <algorithm>
#include <cstring>
#include <new>

#include "cuda/attend_launch.h"
#include "cuda/driver.h"
#include "cuda/exchange.h"
#include "cuda/kernels/shared_sizes.cuh"
#include "cuda/patterns.h"
#include "cuda/rebuild.h"
#include "cuda/row_batch.h"
#include "cuda/search.h"

namespace tandem::cuda {
namespace {

constexpr int kLeastCapability = 80;

struct Device {
  int idx;
  int32_t n_multiprocessors, code;  // the code that the device runs: 90 is 9.0
  bool has_90a;                     // the device runs code for 9.0 alone (90a)
  AttendLauncher launcher;
  Rebuilder rebuilder = {};
  cudaStream_t pulse_stream = nullptr;  // for check()
  cudaEvent_t pulse = nullptr;
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

int32_t make_pulse(Device* device, DeviceError* error) {
  TANDEM_CUDA_TRY(cudaStreamCreateWithFlags(&device->pulse_stream, cudaStreamNonBlocking), error);
  TANDEM_CUDA_TRY(cudaEventCreateWithFlags(&device->pulse, cudaEventDisableTiming), error);
  return TANDEM_OK;
}

void close(void* self) {
  Device* device = &device_of(self);
  const OnDevice on(device->idx);
  if (device->pulse != nullptr) cudaEventDestroy(device->pulse);
  if (device->pulse_stream != nullptr) cudaStreamDestroy(device->pulse_stream);
  delete device;
}

// The build's option TANDEM_CUDA_MOST_SHARED limits the shared memory of any device, for tests. Code from before 9.0, which
// a device may run after compilation from PTX, has no large kernels (kernels/shared_sizes.cuh).
int32_t find_limits(int32_t device_idx, const DeviceInfo& info, DeviceLimits* limits, DeviceError* error) {
  constexpr int kOfSystem = 1024;  // that the system takes of each block; a multiprocessor has at least one
  int of_block = 0, of_multiprocessor = 0;
  TANDEM_CUDA_TRY(cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_idx), error);
  TANDEM_CUDA_TRY(cudaDeviceGetAttribute(&of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_idx),
                  error);
#ifdef TANDEM_CUDA_MOST_SHARED
  of_block = std::min(of_block, TANDEM_CUDA_MOST_SHARED * 1024);
  of_multiprocessor = std::min(of_multiprocessor, TANDEM_CUDA_MOST_SHARED * 1024 + kOfSystem);
#endif
  int32_t code_version = 0;
  if (const int32_t code = find_code_version(&code_version, error); code != TANDEM_OK) return code;
  const int32_t most_size = code_version >= 90 ? of_multiprocessor : std::min(of_multiprocessor, kSmallShared + kOfSystem);
  *limits = {info.compute_capability,
             info.n_multiprocessors,
             of_block,
             of_multiprocessor,
             most_size,
             std::min(info.compute_capability, code_version)};
  return TANDEM_OK;
}

int32_t open(int32_t device_idx, void** self, DeviceError* error) {
  DeviceInfo info;
  describe(device_idx, &info);
  if (info.refusal[0] != '\0')
    return fail(error, TANDEM_ERROR_BACKEND, 0, "device", "device %d: %s", device_idx, info.refusal);
  const OnDevice on(device_idx);
  TANDEM_CUDA_TRY(on.result(), error);
  TANDEM_CUDA_TRY(cudaFree(nullptr), error);  // makes the context
  DeviceLimits limits;
  if (const int32_t code = find_limits(device_idx, info, &limits, error); code != TANDEM_OK) return code;
  if (const int32_t code = load_exchange_kernels(error); code != TANDEM_OK) return code;
  if (const int32_t code = load_search_kernels(limits.has_90a(), error); code != TANDEM_OK) return code;
  if (const int32_t code = load_pattern_kernels(limits.has_90a(), error); code != TANDEM_OK) return code;
  auto* device =
      new (std::nothrow) Device{device_idx, info.n_multiprocessors, limits.code, limits.has_90a(), AttendLauncher(limits)};
  if (device == nullptr) return fail(error, TANDEM_ERROR_OUT_OF_MEMORY, 0, "", "no memory for a device");
  if (const int32_t code = make_pulse(device, error); code != TANDEM_OK) {
    close(device);
    return code;
  }
  *self = device;
  return TANDEM_OK;
}

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

LaunchOn on_stream(void* self, void* stream) {
  const Device& device = device_of(self);
  LaunchOn on = {static_cast<cudaStream_t>(stream), device.code, device.n_multiprocessors};
  on.has_90a = device.has_90a;
  return on;
}

int32_t copy(void* self, void* to, const void* from, int64_t bytes, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  if (may_upload(to, from, bytes)) return launch_upload(to, from, bytes, on_stream(self, stream), error);
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

int32_t most_list_rows(void* self, const Layer* layer, const DeviceRows* q) {
  return device_of(self).launcher.most_list_rows(*layer, *q);
}

int32_t attend(void* self, const DeviceAttend* call, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return device_of(self).launcher.launch(*call, static_cast<cudaStream_t>(stream), error);
}

int32_t allocate_shared(void* self, int64_t bytes, void** host, void** device, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  void* made = nullptr;
  TANDEM_CUDA_TRY(cudaHostAlloc(&made, static_cast<size_t>(bytes), cudaHostAllocPortable | cudaHostAllocMapped), error);
  if (const int32_t code = check(cudaHostGetDevicePointer(device, made, 0), "cudaHostGetDevicePointer", error);
      code != TANDEM_OK) {
    cudaFreeHost(made);
    return code;
  }
  *host = std::memset(made, 0, static_cast<size_t>(bytes));
  return TANDEM_OK;
}

void release_shared(void* self, void* host) {
  const OnDevice on(device_of(self).idx);
  cudaFreeHost(host);
}

// An ended context shows in the result of work. check_device() queries an event on a stream of its own, which never waits.
// Another thread may be capturing a graph, which forbids such calls unless this thread exchanges its capture mode.
int32_t check_device(void* self, DeviceError* error) {
  const Device& device = device_of(self);
  const OnDevice on(device.idx);
  TANDEM_CUDA_TRY(on.result(), error);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  TANDEM_CUDA_TRY(cudaThreadExchangeStreamCaptureMode(&mode), error);
  cudaError_t result = cudaEventRecord(device.pulse, device.pulse_stream);
  if (result == cudaSuccess) result = cudaStreamQuery(device.pulse_stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (result != cudaErrorNotReady) return check(result, "cudaStreamQuery", error);
  cudaGetLastError();  // not a failure
  return TANDEM_OK;
}

int32_t capturing(void* self, void* stream, int32_t* is_capturing, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  TANDEM_CUDA_TRY(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), error);
  *is_capturing = status != cudaStreamCaptureStatusNone;
  return TANDEM_OK;
}

int32_t append(void* self, const DeviceAppend* call, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return launch_append(*call, on_stream(self, stream), error);
}

int32_t merge(void* self, const DeviceMerge* call, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return launch_merge(*call, on_stream(self, stream), error);
}

int32_t observe(void* self, const DeviceObserve* call, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return launch_observe(*call, on_stream(self, stream), error);
}

int32_t name_keys(void* self, const DeviceNamedKeys* call, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return launch_name_keys(*call, on_stream(self, stream), error);
}

int32_t accumulate(void* self, const DeviceAccumulate* call, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return launch_accumulate(*call, on_stream(self, stream), error);
}

int32_t create_stream(void* self, void** stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  cudaStream_t made = nullptr;
  int least = 0, greatest = 0;
  TANDEM_CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest), error);
  TANDEM_CUDA_TRY(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest), error);
  *stream = made;
  return TANDEM_OK;
}

void destroy_stream(void* self, void* stream) {
  const OnDevice on(device_of(self).idx);
  cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}

int32_t create_event(void* self, void** event, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  cudaEvent_t made = nullptr;
  TANDEM_CUDA_TRY(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), error);
  *event = made;
  return TANDEM_OK;
}

void destroy_event(void* self, void* event) {
  const OnDevice on(device_of(self).idx);
  cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

int32_t record_event(void* self, void* event, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  TANDEM_CUDA_TRY(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)), error);
  return TANDEM_OK;
}

int32_t wait_event(void* self, void* event, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  TANDEM_CUDA_TRY(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0), error);
  return TANDEM_OK;
}

int32_t copy_strided(void* self, const StridedCopy* copy, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  const auto row_bytes = static_cast<size_t>(copy->row_bytes), n_rows = static_cast<size_t>(copy->n_rows);
  const auto at = static_cast<cudaStream_t>(stream);
  if (n_rows == 1)
    TANDEM_CUDA_TRY(cudaMemcpyAsync(copy->to, copy->from, row_bytes, cudaMemcpyDefault, at), error);
  else
    TANDEM_CUDA_TRY(cudaMemcpy2DAsync(copy->to, static_cast<size_t>(copy->to_stride), copy->from,
                                      static_cast<size_t>(copy->from_stride), row_bytes, n_rows, cudaMemcpyDefault, at),
                    error);
  return TANDEM_OK;
}

int32_t copy_batch(void* self, const StridedCopy* copies, int64_t n_copies, void* stream, DeviceError* error) {
  constexpr int64_t kLeastRow =
      128 << 10;  // bytes; a batch needs 1.2 us or more a row, and one copy brings all rows of a StridedCopy at once
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  RowBatch batch(static_cast<cudaStream_t>(stream));
  for (const StridedCopy* copy = copies; copy < copies + n_copies; ++copy) {
    const bool is_one = copy->n_rows > 1 && copy->row_bytes < kLeastRow;
    if (is_one)
      if (const int32_t code = copy_strided(self, copy, stream, error); code != TANDEM_OK) return code;
    for (int64_t i = 0; i < copy->n_rows && !is_one; ++i)
      TANDEM_CUDA_TRY(
          batch.add(static_cast<std::byte*>(copy->to) + i * copy->to_stride,
                    static_cast<const std::byte*>(copy->from) + i * copy->from_stride, static_cast<size_t>(copy->row_bytes)),
          error);
  }
  TANDEM_CUDA_TRY(batch.send(), error);
  return TANDEM_OK;
}

int32_t pin(void* self, void* data, int64_t bytes, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  TANDEM_CUDA_TRY(cudaHostRegister(data, static_cast<size_t>(bytes), cudaHostRegisterPortable), error);
  return TANDEM_OK;
}

void unpin(void* self, void* data) {
  const OnDevice on(device_of(self).idx);
  if (cudaHostUnregister(data) != cudaSuccess) cudaGetLastError();
}

int32_t supports_rebuild(void* self, const Layer* layer, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return device_of(self).rebuilder.supports(*layer, error);
}

int64_t rebuild_bytes(void*, const Layer* layer, int64_t n_rows) { return Rebuilder::workspace_bytes(*layer, n_rows); }

int32_t rebuild(void* self, const DeviceRebuild* call, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return device_of(self).rebuilder.launch(*call, on_stream(self, stream), error);
}

int32_t bound_chunks(void* self, const DeviceBoundChunks* call, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return launch_bound_chunks(*call, on_stream(self, stream), error);
}

int64_t search_bytes(void* self, const DeviceSearch* call) {
  return search_workspace_bytes(*call, device_of(self).n_multiprocessors);
}

int32_t search(void* self, const DeviceSearch* call, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return launch_search(*call, on_stream(self, stream), error);
}

int64_t pattern_bytes(void*, const DevicePatterns* call) { return pattern_workspace_bytes(*call); }

int32_t index_patterns(void* self, const DevicePatterns* call, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return launch_index_patterns(*call, on_stream(self, stream), error);
}

int32_t list_patterns(void* self, const DevicePatterns* call, void* stream, DeviceError* error) {
  const OnDevice on(device_of(self).idx);
  TANDEM_CUDA_TRY(on.result(), error);
  return launch_list_patterns(*call, on_stream(self, stream), error);
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
    most_list_rows,
    append,
    attend,
    merge,
    observe,
    accumulate,
    create_stream,
    destroy_stream,
    create_event,
    destroy_event,
    record_event,
    wait_event,
    copy_strided,
    copy_batch,
    pin,
    unpin,
    supports_rebuild,
    rebuild_bytes,
    rebuild,
    name_keys,
    bound_chunks,
    search_bytes,
    search,
    pattern_bytes,
    index_patterns,
    list_patterns,
};

}  // namespace
}  // namespace tandem::cuda

extern "C" __attribute__((visibility("default"))) const tandem::DeviceTable* tandem_device_module(uint32_t abi) {
  return abi == tandem::kDeviceAbi ? &tandem::cuda::kTable : nullptr;
}
