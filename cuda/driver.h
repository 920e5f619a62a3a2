// SPDX-License-Identifier: MIT
// CUDA's results as DeviceErrors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdarg>
#include <cstdio>

#include "lib/device.h"

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

// Makes a device current for a scope and leaves the caller's as found.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = -1;
    result_ = before_ == device ? cudaSuccess : cudaSetDevice(device);
    if (before_ == device) before_ = -1;
  }
  ~OnDevice() {
    if (before_ >= 0) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  cudaError_t result() const { return result_; }

 private:
  int before_ = -1;
  cudaError_t result_;
};

}  // namespace tandem::cuda

#define TANDEM_CUDA_TRY(call, error)                                                                        \
  do {                                                                                                      \
    if (const int32_t code = ::tandem::cuda::check((call), #call, (error)); code != TANDEM_OK) return code; \
  } while (false)
