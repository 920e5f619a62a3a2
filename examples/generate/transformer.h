// SPDX-License-Identifier: MIT
// The forward pass of a Llama-family model, with everything but attention done here:
//
//   x = embedding[token]
//   per layer:  x += Wo attend(rope(Wq norm(x)), rope(Wk norm(x)), Wv norm(x))        Tandem keeps K and V
//               x += Wdown(silu(Wgate norm(x)) * Wup norm(x))
//   logits = Wout norm(x)
#ifndef EXAMPLES_GENERATE_TRANSFORMER_H_
#define EXAMPLES_GENERATE_TRANSFORMER_H_

#include <tandem/tandem.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "failure.h"
#include "linear.h"
#include "llama_config.h"
#include "safetensors.h"

namespace generate {

// Tokens to append to one sequence in a session, and how.
struct Chunk {
  tandem_session* session = nullptr;
  int64_t sequence = 0;
  int64_t position = 0;  // tokens already there
  std::string_view tokens;
  uint32_t flags = 0;  // TANDEM_ATTEND_*
};

class Transformer {
 public:
  // library_rope: keys are handed over unrotated, Tandem rotates.
  Failure load(const ModelConfig& config, const WeightFiles& weights, bool library_rope, int32_t n_threads);
  // One layer of this model, as Tandem wants to know it.
  tandem_layer_options layer_options() const;
  // One step: every layer of every token of the chunk. Afterwards logits() may be asked for its tokens.
  Failure forward(const Chunk& chunk);
  // Logits of tokens [first, first + n) of the last chunk: [n, vocab_size], valid until the next call.
  const float* logits(int64_t first, int64_t n);
  const ModelConfig& config() const { return config_; }

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
  int64_t qkv_size() const { return (config_.n_q_heads + 2 * config_.n_kv_heads) * config_.head_dim; }

  ModelConfig config_;
  bool library_rope_ = false;
  int32_t n_threads_ = 1;
  std::vector<float> embedding_;  // [vocab_size, hidden_size]
  std::vector<float> final_norm_, inv_freq_;
  std::vector<Layer> layers_;
  std::vector<Linear> head_;  // one

  // Activations of the current chunk, one row per token; they grow to the longest chunk seen.
  std::vector<float> x_, normed_, qkv_, o_, gate_, ffn_, logits_;
  std::vector<float> cosine_, sine_;  // [n_tokens, head_dim / 2]
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_TRANSFORMER_H_
