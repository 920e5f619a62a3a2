// SPDX-License-Identifier: MIT
// The forward pass on the CPU, in f32.
#ifndef EXAMPLES_GENERATE_CPU_TRANSFORMER_H_
#define EXAMPLES_GENERATE_CPU_TRANSFORMER_H_

#include <vector>

#include "linear.h"
#include "safetensors.h"
#include "transformer.h"

namespace generate {

class CpuTransformer : public Transformer {
 public:
  CpuTransformer(const ModelConfig& config, bool library_rope, int32_t n_threads)
      : Transformer(config), library_rope_(library_rope), n_threads_(n_threads), inv_freq_(inverse_frequencies(config)) {}
  Failure load(const WeightFiles& weights);
  Failure forward(const Chunk& chunk) override;
  const float* logits(int64_t first, int64_t n) override;
  void rest() override { pause_linear_threads(); }

 private:
  struct Layer {
    std::vector<float> attention_norm, ffn_norm;  // [hidden_size]
    Linear qkv, out, gate, up, down;
  };
  Failure load_layer(const WeightFiles& weights, int64_t layer_idx);
  Failure attend(const Chunk& chunk, int64_t layer_idx);
  Failure run_layers(const Chunk& chunk);
  void normalize(float* out, const float* in, const std::vector<float>& weight, int64_t n_rows) const;
  void prepare_rotation(int64_t first_position, int64_t n_rows);
  void rotate_rows(int64_t n_rows);

  bool library_rope_;
  int32_t n_threads_;
  std::vector<float> embedding_;  // [vocab_size, hidden_size]
  std::vector<float> final_norm_, inv_freq_;
  std::vector<Layer> layers_;
  std::vector<Linear> head_;  // one element

  // Activations of the current chunk, one row per token. They grow to the longest chunk so far.
  std::vector<float> x_, normed_, qkv_, o_, gate_, ffn_, logits_;
  std::vector<float> cosine_, sine_;  // [n_tokens, head_dim / 2]
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_CPU_TRANSFORMER_H_
