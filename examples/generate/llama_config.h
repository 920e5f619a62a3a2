// SPDX-License-Identifier: MIT
// Reads config.json of a Hugging Face model of the Llama family.
#ifndef EXAMPLES_GENERATE_LLAMA_CONFIG_H_
#define EXAMPLES_GENERATE_LLAMA_CONFIG_H_

#include <cstdint>
#include <string>

#include "failure.h"

namespace generate {

struct ModelConfig {
  std::string model_type;  // llama, mistral, qwen2
  int64_t hidden_size = 0;
  int64_t n_layers = 0;
  int64_t n_q_heads = 0;
  int64_t n_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t ffn_size = 0;
  int64_t vocab_size = 0;
  int64_t max_tokens = 0;             // positions that the model was made for; 0: not given
  int64_t sliding_window_tokens = 0;  // 0: off
  double rms_eps = 0;
  double rope_theta = 0;
  bool tied_embeddings = false;

  int64_t q_size() const { return n_q_heads * head_dim; }
  int64_t kv_size() const { return n_kv_heads * head_dim; }
  int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
};

// Reads DIR/config.json. Refuses models that this runtime would compute wrongly: other architectures, activations, scaled
// RoPE.
Failure read_model_config(ModelConfig* config, const std::string& directory);
// Refuses more tokens than the model was made for. what: the flag with its value, such as "--context: \"20000\"".
Failure check_length(const std::string& directory, const std::string& what, int64_t n_tokens);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_LLAMA_CONFIG_H_
