// SPDX-License-Identifier: MIT
// A model's weights in device memory; or, but for the layers' matrices, which Tandem then brings from the host as they are
// used.
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
  CudaArray<T> head;       // the same, empty where the embedding serves
  CudaArray<float> final_norm;
  std::vector<Layer> layers;

  // Throws where the device fails; all has arrived when it returns.
  Failure load(const ModelConfig& config, const CudaOptions& options, cudaStream_t stream);
  int64_t bytes() const;

  // What a layer multiplies by before and after its attention, and for its MLP.
  struct Pair {
    const T *first, *second;  // qkv and out; gate_up and down
  };
  enum Part { kAttention, kMlp };
  // Where they are, for what is asked of the stream until done().
  Failure use(int64_t layer_idx, Part part, cudaStream_t stream, Pair* pair);
  Failure done(int64_t layer_idx, Part part, cudaStream_t stream);
  // Of hidden states after the norm. Matrices of 16 bits that stay on the device are borrowed, others copied, f32 as f16.
  Failure get_projection(const ModelConfig& config, int64_t layer_idx, cudaStream_t stream, LayerProjection* projection);
  Failure get_stats(tandem_weights_stats* stats) const;

 private:
  struct Release {
    void operator()(tandem_weights* weights) const { tandem_weights_release(weights); }
  };
  Failure offload(const std::vector<std::vector<T>>& blocks, const CudaOptions& options);
  static int32_t block_of(int64_t layer_idx, Part part) { return static_cast<int32_t>(2 * layer_idx + part); }

  std::unique_ptr<tandem_weights, Release> offloaded_;  // null: all are in layers
  std::vector<int64_t> second_at_;                      // elements, [n_blocks]
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_CUDA_CUDA_WEIGHTS_H_
