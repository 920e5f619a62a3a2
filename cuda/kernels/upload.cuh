// SPDX-License-Identifier: MIT
// Descriptors of a call, from pinned host memory, read across the bus by a kernel. The copy engine would bring them as fast,
// but only when it is done with what it has begun: pieces of K and V for the layers to come, half a millisecond of them.
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/exchange_wait.cuh"

namespace tandem::cuda {

inline constexpr int kUploadWarps = 8, kUploadUnit = sizeof(uint2);

struct UploadCall {
  uint2* to = nullptr;
  const uint2* from = nullptr;
  int64_t n = 0;
};

// Kernels look at their descriptors before they wait for what goes before them: they do not start before this one has ended.
__global__ void __launch_bounds__(32 * kUploadWarps) upload_kernel(const __grid_constant__ UploadCall call) {
  wait_for_before();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < call.n; i += step) call.to[i] = __ldcv(call.from + i);
  __threadfence();
}

}  // namespace tandem::cuda
