// SPDX-License-Identifier: MIT
// A model's weights in device memory.
#ifndef EXAMPLES_GENERATE_CUDA_CUDA_WEIGHTS_H_
#define EXAMPLES_GENERATE_CUDA_CUDA_WEIGHTS_H_

#include <vector>

#include "cuda_memory.h"
#include "cuda_transformer.h"

namespace generate {

// T: float or __nv_bfloat16. Norms and biases are f32.
template <class T>
struct CudaWeights {
  struct Layer {
    CudaArray<float> attention_norm, ffn_norm;  // [hidden_size]
    CudaArray<T> qkv;                           // [qkv_size, hidden_size]
    CudaArray<float> qkv_bias;                  // [qkv_size] or empty
    CudaArray<T> out;                           // [hidden_size, q_size]
    CudaArray<T> gate_up;                       // [2 * ffn_size, hidden_size]
    CudaArray<T> down;                          // [hidden_size, ffn_size]
  };
  CudaArray<T> embedding;  // [vocab_size, hidden_size]
  CudaArray<T> head;       // the same, empty where the embedding serves
  CudaArray<float> final_norm;
  std::vector<Layer> layers;

  // Throws where the device fails; all has arrived when it returns.
  Failure load(const ModelConfig& config, const CudaOptions& options, cudaStream_t stream);
  int64_t bytes() const;
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_CUDA_CUDA_WEIGHTS_H_
