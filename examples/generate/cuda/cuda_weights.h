// SPDX-License-Identifier: MIT
// A model's weights in device memory. The layers' matrices may instead be in host memory, and Tandem brings them when they
// are used.
#ifndef EXAMPLES_GENERATE_CUDA_CUDA_WEIGHTS_H_
#define EXAMPLES_GENERATE_CUDA_CUDA_WEIGHTS_H_

#include <memory>
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
  CudaArray<T> head;       // the same shape; empty if the embedding serves as head
  CudaArray<float> final_norm;
  std::vector<Layer> layers;

  // Loads the weights and waits until they are on the device. Throws if the device fails.
  Failure load(const ModelConfig& config, const CudaOptions& options, cudaStream_t stream);
  int64_t bytes() const;

  // The matrices of a layer's attention, or of its MLP.
  struct Pair {
    const T *first, *second;  // qkv and out; gate_up and down
  };
  enum Part { kAttention, kMlp };
  // Gives the addresses of a part's matrices, for work on the stream until done().
  Failure use(int64_t layer_idx, Part part, cudaStream_t stream, Pair* pair);
  Failure done(int64_t layer_idx, Part part, cudaStream_t stream);
  // Gives the projection of hidden states after the norm. 16-bit matrices that stay on the device are borrowed. Others are
  // copied, f32 as f16.
  Failure get_projection(const ModelConfig& config, int64_t layer_idx, cudaStream_t stream, LayerProjection* projection);
  Failure get_stats(tandem_weights_stats* stats) const;

 private:
  struct Release {
    void operator()(tandem_weights* weights) const { tandem_weights_release(weights); }
  };
  Failure offload(const std::vector<std::vector<T>>& blocks, const CudaOptions& options);
  static int32_t block_of(int64_t layer_idx, Part part) { return static_cast<int32_t>(2 * layer_idx + part); }

  std::unique_ptr<tandem_weights, Release> offloaded_;  // null: all matrices are in layers
  std::vector<int64_t> second_at_;                      // start of the second matrix in elements, [n_blocks]
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_CUDA_CUDA_WEIGHTS_H_
