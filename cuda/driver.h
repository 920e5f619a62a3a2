// SPDX-License-Identifier: MIT
// Converts CUDA's results to DeviceErrors.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstdarg>
#include <cstdio>

#include "lib/tables/device.h"

namespace tandem::cuda {

// Fills *error and returns code. field names the refused argument, "" where none applies.
[[gnu::format(printf, 5, 6)]] inline int32_t fail(DeviceError* error, int32_t code, int64_t underlying, const char* field,
                                                  const char* format, ...) {
  *error = {};
  error->code = code;
  error->underlying = underlying;
  std::snprintf(error->field, sizeof error->field, "%s", field);
  va_list args;
  va_start(args, format);
  std::vsnprintf(error->message, sizeof error->message, format, args);
  va_end(args);
  return code;
}

// True if the result ends the context. Nothing works on the device from then on.
inline bool ends_context(cudaError_t result) {
  switch (result) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
#if CUDART_VERSION >= 13000
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
#endif
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

// Converts a result of the CUDA run time. Results that end the context become DEVICE_LOST, missing memory becomes
// OUT_OF_MEMORY, a device that the module was not compiled for UNSUPPORTED, and all else BACKEND.
inline int32_t check(cudaError_t result, const char* what, DeviceError* error) {
  if (result == cudaSuccess) return TANDEM_OK;
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // clears the error, which is not sticky
    return fail(error, TANDEM_ERROR_OUT_OF_MEMORY, result, "", "%s: %s", what, cudaGetErrorString(result));
  }
  if (result == cudaErrorNoKernelImageForDevice || result == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    return fail(error, TANDEM_ERROR_UNSUPPORTED, result, "", "this module was not compiled for this device: %s",
                cudaGetErrorString(result));
  }
  if (!ends_context(result)) cudaGetLastError();
  return fail(error, ends_context(result) ? TANDEM_ERROR_DEVICE_LOST : TANDEM_ERROR_BACKEND, result, "", "%s: %s (%s)", what,
              cudaGetErrorString(result), cudaGetErrorName(result));
}

// Finds a driver function, as of a version, at run time: the module does not link the driver.
inline cudaError_t look_up_driver(const char* name, unsigned version, void** function) {
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t result = cudaGetDriverEntryPointByVersion(name, function, version, cudaEnableDefault, &found);
#else
  const cudaError_t result = cudaGetDriverEntryPoint(name, function, cudaEnableDefault, &found);
#endif
  if (result != cudaSuccess) return result;
  return found == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorSymbolNotFound;
}

// The driver's calls for the current context. The run time cannot report it: a context that the caller made looks to the
// run time like the device's own.
struct ContextCalls {
  PFN_cuCtxGetCurrent_v4000 get = nullptr;
  PFN_cuCtxSetCurrent_v4000 set = nullptr;
  cudaError_t result = cudaSuccess;

  static const ContextCalls& found() {
    static const ContextCalls calls = [] {
      ContextCalls made;
      made.result = look_up_driver("cuCtxGetCurrent", 4000, reinterpret_cast<void**>(&made.get));
      if (made.result == cudaSuccess)
        made.result = look_up_driver("cuCtxSetCurrent", 4000, reinterpret_cast<void**>(&made.set));
      return made;
    }();
    return calls;
  }
};

// Makes a device current for a scope. Restores what was current before: a device, the caller's own context, or none.
class OnDevice {
 public:
  explicit OnDevice(int device) : calls_(ContextCalls::found()), result_(calls_.result) {
    if (result_ != cudaSuccess) return;
    if (calls_.get(&before_) != CUDA_SUCCESS) result_ = cudaErrorInitializationError;
    if (result_ != cudaSuccess) return;
    result_ = cudaSetDevice(device);
    is_changed_ = true;
  }
  ~OnDevice() {
    if (is_changed_) calls_.set(before_);
  }
  OnDevice(const OnDevice&) = delete;
  cudaError_t result() const { return result_; }

 private:
  const ContextCalls& calls_;
  CUcontext before_ = nullptr;
  bool is_changed_ = false;
  cudaError_t result_;
};

}  // namespace tandem::cuda

#define TANDEM_CUDA_TRY(call, error)                                                                        \
  do {                                                                                                      \
    if (const int32_t code = ::tandem::cuda::check((call), #call, (error)); code != TANDEM_OK) return code; \
  } while (false)
