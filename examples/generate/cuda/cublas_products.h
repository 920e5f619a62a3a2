// SPDX-License-Identifier: MIT
// y = x W^T by cuBLAS. Sums are f32, and f32 numbers are multiplied as f32 (no TF32).
#ifndef EXAMPLES_GENERATE_CUDA_CUBLAS_PRODUCTS_H_
#define EXAMPLES_GENERATE_CUDA_CUBLAS_PRODUCTS_H_

#include <cublas_v2.h>

#include "cuda_memory.h"

namespace generate {

struct Product {
  const void* weight;  // [n_out, n_in]
  const void* x;       // [n_rows, n_in], of the weight's type
  void* y;             // [n_rows, n_out]
  int64_t n_rows, n_in, n_out;
  cudaDataType_t type, y_type;  // of weight and x; of y
  bool adds;                    // y += x W^T
};

class CublasProducts {
 public:
  // Runs everything on this stream, which may be captured. Throws if cuBLAS cannot be opened or fails.
  explicit CublasProducts(cudaStream_t stream);
  CublasProducts(const CublasProducts&) = delete;
  CublasProducts& operator=(const CublasProducts&) = delete;
  ~CublasProducts();
  void apply(const Product& product);
  int64_t bytes() const { return workspace_.bytes(); }

 private:
  void must_succeed(cublasStatus_t status, const char* what) const;

  struct Functions;
  const Functions& functions_;
  CudaArray<char> workspace_;  // allocated here, so that cuBLAS allocates nothing while a stream is captured
  cublasHandle_t handle_ = nullptr;
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_CUDA_CUBLAS_PRODUCTS_H_
