// SPDX-License-Identifier: MIT
// cuBLAS. The module opens the library when keys are first rebuilt, and never links it.
#pragma once

#include "cuda/driver.h"

namespace tandem::cuda {

// y = x W, row by row: x [n_rows, n_in], y [n_rows, n_out]. Sums and y are f32. With w_2, one call multiplies x by both
// matrices, which have the same shape. w_2 lies behind w in memory, and its y follows the y of w. At the end of each of two
// separate calls a part of the device would be idle.
struct Product {
  const void* x = nullptr;
  const void* w = nullptr;    // the matrix, of x's type
  const void* w_2 = nullptr;  // the second matrix, of x's type, or null
  bool is_out_by_in = false;  // w is [n_out, n_in], else [n_in, n_out]
  int32_t dtype = 0;          // type of x, w and w_2: f16 or bf16
  int64_t n_rows = 0, n_in = 0, n_out = 0;
  float* y = nullptr;
};

// cuBLAS on one device, which is current in every call. A handle serves one thread at a time, so callers hold a lock while
// they multiply.
class Cublas {
 public:
  static constexpr int64_t kWorkspaceBytes = int64_t{4} << 20;  // no product is faster with cuBLAS's own default of 32 MiB

  Cublas() = default;
  ~Cublas();
  Cublas(const Cublas&) = delete;
  // Opens the library and makes the handle. Returns UNSUPPORTED and names the library if it cannot be opened.
  int32_t open(DeviceError* error);
  // Later products go to the stream. workspace has kWorkspaceBytes bytes.
  int32_t begin(cudaStream_t stream, void* workspace, DeviceError* error);
  int32_t multiply(const Product& product, DeviceError* error);

 private:
  void* handle_ = nullptr;
};

}  // namespace tandem::cuda
