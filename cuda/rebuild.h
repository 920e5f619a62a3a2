// SPDX-License-Identifier: MIT
// rebuild(): makes rows of K and V from hidden states. The device is current in every call. Any thread may call.
#pragma once

#include <mutex>

#include "cuda/cublas.h"
#include "cuda/exchange.h"

namespace tandem::cuda {

class Rebuilder {
 public:
  int32_t supports(const Layer& layer, DeviceError* error);
  static int64_t workspace_bytes(const Layer& layer, int64_t n_rows);
  int32_t launch(const DeviceRebuild& call, const LaunchOn& on, DeviceError* error);

 private:
  struct Sums {
    float *k, *v;
  };
  int32_t multiply(const DeviceRebuild& call, const void* x, const Sums& sums, const LaunchOn& on, DeviceError* error);

  std::mutex mutex_;  // guards the cuBLAS handle
  Cublas cublas_;
};

}  // namespace tandem::cuda
