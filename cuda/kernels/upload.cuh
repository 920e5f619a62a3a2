// SPDX-License-Identifier: MIT
// Reads the descriptors of a call across the bus by a kernel, from pinned host memory. The copy engine is as fast, but
// first finishes its earlier copies: pieces of K and V for later layers, which take half a millisecond.
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

// Does not call let_next_start(): kernels read their descriptors before they wait for earlier kernels, so none may start
// before this kernel has ended.
__global__ void __launch_bounds__(32 * kUploadWarps) upload_kernel(const __grid_constant__ UploadCall call) {
  wait_for_before();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < call.n; i += step) call.to[i] = __ldcv(call.from + i);
  __threadfence();
}

}  // namespace tandem::cuda
