// SPDX-License-Identifier: MIT
// CUDA's results as DeviceErrors.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstdarg>
#include <cstdio>

#include "lib/tables/device.h"

namespace tandem::cuda {

// Fills *error and returns code. field names the argument that was refused, "" where none applies.
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

// What ends a context: nothing will work on the device from then on.
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

// Of a call of the CUDA run time. What ends the context is DEVICE_LOST, memory that is not there OUT_OF_MEMORY, a device
// that the module was not compiled for UNSUPPORTED, everything else BACKEND.
inline int32_t check(cudaError_t result, const char* what, DeviceError* error) {
  if (result == cudaSuccess) return TANDEM_OK;
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // it does not stick
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

// A function of the driver, as of a version: the module does not link it.
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

// The driver's idea of what is current, which the run time does not tell: a context of the caller's own looks like the
// device's there.
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

// Makes a device current for a scope, and then what was before: a device, a context of the caller's own, or none.
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
