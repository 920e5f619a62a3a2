// SPDX-License-Identifier: MIT
// cuBLAS, which the module opens when it is first needed and never links: whoever does not rebuild keys needs none.
#pragma once

#include "cuda/driver.h"

namespace tandem::cuda {

// y = x W, row after row: x [n_rows, n_in], y [n_rows, n_out] in f32, sums in f32. Of two matrices of one shape with the
// same x at once, the second of them behind the first, whose y follow each other: one call has work for a device that each
// would leave a part of idle at its end.
struct Product {
  const void* x = nullptr;
  const void* w = nullptr;    // of x's type
  const void* w_2 = nullptr;  // likewise, or null
  bool is_out_by_in = false;  // w is [n_out, n_in], else [n_in, n_out]
  int32_t dtype = 0;          // f16 or bf16
  int64_t n_rows = 0, n_in = 0, n_out = 0;
  float* y = nullptr;
};

// Of one device, which is current in every call. A handle serves one thread at a time: who multiplies holds a lock.
class Cublas {
 public:
  static constexpr int64_t kWorkspaceBytes = int64_t{4} << 20;  // with 32 MiB, what it takes itself, no product is faster

  Cublas() = default;
  ~Cublas();
  Cublas(const Cublas&) = delete;
  // UNSUPPORTED, naming the library, where it cannot be opened.
  int32_t open(DeviceError* error);
  // What follows goes to the stream, with work space of kWorkspaceBytes.
  int32_t begin(cudaStream_t stream, void* workspace, DeviceError* error);
  int32_t multiply(const Product& product, DeviceError* error);

 private:
  void* handle_ = nullptr;
};

}  // namespace tandem::cuda
