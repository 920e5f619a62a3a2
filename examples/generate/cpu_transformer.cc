// SPDX-License-Identifier: MIT
#include "cpu_transformer.h"

#include <algorithm>
#include <cmath>

namespace generate {

Failure CpuTransformer::load(const WeightFiles& weights) {
  const ModelConfig& config = config_;
  GENERATE_TRY(weights.read_f32("model.embed_tokens.weight", {config.vocab_size, config.hidden_size}, &embedding_));
  GENERATE_TRY(weights.read_f32("model.norm.weight", {config.hidden_size}, &final_norm_));
  for (int64_t layer_idx = 0; layer_idx < config.n_layers; ++layer_idx) GENERATE_TRY(load_layer(weights, layer_idx));
  std::vector<float> head;
  if (!config.tied_embeddings)
    GENERATE_TRY(weights.read_f32("lm_head.weight", {config.vocab_size, config.hidden_size}, &head));
  head_.emplace_back(config.tied_embeddings ? embedding_ : head, std::vector<float>(), config.hidden_size, config.vocab_size,
                     After::kNothing, n_threads_);
  return weights.refuse_unread();
}

Failure CpuTransformer::load_layer(const WeightFiles& weights, int64_t layer_idx) {
  const std::string prefix = "model.layers." + std::to_string(layer_idx) + ".";
  const int64_t hidden = config_.hidden_size, ffn = config_.ffn_size;
  const int64_t q_size = config_.n_q_heads * config_.head_dim, kv_size = config_.n_kv_heads * config_.head_dim;

  // One matrix for q, k and v. Either all have biases (Qwen2) or none has.
  const bool has_bias = weights.has(prefix + "self_attn.q_proj.bias");
  std::vector<float> qkv, bias, part;
  for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
    const int64_t n_out = name[0] == 'q' ? q_size : kv_size;
    GENERATE_TRY(weights.read_f32(prefix + "self_attn." + name + ".weight", {n_out, hidden}, &part));
    qkv.insert(qkv.end(), part.begin(), part.end());
    if (!has_bias) continue;
    GENERATE_TRY(weights.read_f32(prefix + "self_attn." + name + ".bias", {n_out}, &part));
    bias.insert(bias.end(), part.begin(), part.end());
  }
  std::vector<float> out, gate, up, down, attention_norm, ffn_norm;
  GENERATE_TRY(weights.read_f32(prefix + "self_attn.o_proj.weight", {hidden, q_size}, &out));
  GENERATE_TRY(weights.read_f32(prefix + "mlp.gate_proj.weight", {ffn, hidden}, &gate));
  GENERATE_TRY(weights.read_f32(prefix + "mlp.up_proj.weight", {ffn, hidden}, &up));
  GENERATE_TRY(weights.read_f32(prefix + "mlp.down_proj.weight", {hidden, ffn}, &down));
  GENERATE_TRY(weights.read_f32(prefix + "input_layernorm.weight", {hidden}, &attention_norm));
  GENERATE_TRY(weights.read_f32(prefix + "post_attention_layernorm.weight", {hidden}, &ffn_norm));
  const std::vector<float> none;
  layers_.push_back({std::move(attention_norm), std::move(ffn_norm),
                     Linear(qkv, bias, hidden, config_.qkv_size(), After::kNothing, n_threads_),
                     Linear(out, none, q_size, hidden, After::kAddToOutput, n_threads_),
                     Linear(gate, none, hidden, ffn, After::kSilu, n_threads_),
                     Linear(up, none, hidden, ffn, After::kTimes, n_threads_),
                     Linear(down, none, ffn, hidden, After::kAddToOutput, n_threads_)});
  return {};
}

Failure CpuTransformer::forward(const Chunk& chunk) {
  const int64_t n_tokens = static_cast<int64_t>(chunk.tokens.size()), hidden = config_.hidden_size;
  const auto at_least = [n_tokens](std::vector<float>* rows, int64_t row_size) {
    if (static_cast<int64_t>(rows->size()) < n_tokens * row_size) rows->resize(n_tokens * row_size);
  };
  at_least(&x_, hidden);
  at_least(&normed_, hidden);
  at_least(&qkv_, config_.qkv_size());
  at_least(&o_, config_.n_q_heads * config_.head_dim);
  at_least(&gate_, config_.ffn_size);
  at_least(&ffn_, config_.ffn_size);
  for (int64_t row = 0; row < n_tokens; ++row)
    std::copy_n(&embedding_[chunk.tokens[row] * hidden], hidden, &x_[row * hidden]);
  if (!library_rope_) prepare_rotation(chunk.position, n_tokens);

  GENERATE_TANDEM(tandem_step_begin(chunk.session, &chunk.sequence, &n_tokens, 1, nullptr, &error));
  const Failure failure = run_layers(chunk);
  if (failure) {  // the step is incomplete, so closing it rolls back the sequence
    tandem_step_end(chunk.session, nullptr, nullptr);
    return failure;
  }
  GENERATE_TANDEM(tandem_step_end(chunk.session, nullptr, &error));
  return {};
}

Failure CpuTransformer::run_layers(const Chunk& chunk) {
  const int64_t n_tokens = static_cast<int64_t>(chunk.tokens.size());
  for (int64_t layer_idx = 0; layer_idx < config_.n_layers; ++layer_idx) {
    Layer& layer = layers_[layer_idx];
    normalize(normed_.data(), x_.data(), layer.attention_norm, n_tokens);
    layer.qkv.apply(qkv_.data(), normed_.data(), n_tokens);
    if (!library_rope_) rotate_rows(n_tokens);
    GENERATE_TRY(attend(chunk, layer_idx));
    layer.out.apply(x_.data(), o_.data(), n_tokens);
    normalize(normed_.data(), x_.data(), layer.ffn_norm, n_tokens);
    layer.gate.apply(gate_.data(), normed_.data(), n_tokens);
    layer.up.apply(ffn_.data(), normed_.data(), n_tokens, gate_.data());
    layer.down.apply(x_.data(), ffn_.data(), n_tokens);
  }
  return {};
}

Failure CpuTransformer::attend(const Chunk& chunk, int64_t layer_idx) {
  const int64_t n_tokens = static_cast<int64_t>(chunk.tokens.size()), head_dim = config_.head_dim;
  const int64_t q_size = config_.n_q_heads * head_dim, kv_size = config_.n_kv_heads * head_dim;
  HeadsOfChunk heads;
  heads.q = heads_view(qkv_.data(), TANDEM_F32, n_tokens, config_.n_q_heads, head_dim, config_.qkv_size());
  heads.k = heads_view(qkv_.data() + q_size, TANDEM_F32, n_tokens, config_.n_kv_heads, head_dim, config_.qkv_size());
  heads.v =
      heads_view(qkv_.data() + q_size + kv_size, TANDEM_F32, n_tokens, config_.n_kv_heads, head_dim, config_.qkv_size());
  heads.o = heads_view(o_.data(), TANDEM_F32, n_tokens, config_.n_q_heads, head_dim, q_size);
  return attend_chunk(chunk, layer_idx, heads);
}

const float* CpuTransformer::logits(int64_t first, int64_t n) {
  const int64_t hidden = config_.hidden_size;
  if (static_cast<int64_t>(logits_.size()) < n * config_.vocab_size) logits_.resize(n * config_.vocab_size);
  normalize(normed_.data(), &x_[first * hidden], final_norm_, n);
  head_[0].apply(logits_.data(), normed_.data(), n);
  return logits_.data();
}

// Computes out = weight * in / sqrt(mean(in^2) + eps), row by row.
void CpuTransformer::normalize(float* out, const float* in, const std::vector<float>& weight, int64_t n_rows) const {
  const int64_t hidden = config_.hidden_size;
  for (int64_t row = 0; row < n_rows; ++row) {
    const float* x = in + row * hidden;
    float* y = out + row * hidden;
    double sum = 0;
    for (int64_t i = 0; i < hidden; ++i) sum += static_cast<double>(x[i]) * x[i];
    const float factor = static_cast<float>(1 / std::sqrt(sum / hidden + config_.rms_eps));
    for (int64_t i = 0; i < hidden; ++i) y[i] = weight[i] * (x[i] * factor);
  }
}

// Computes the angles of a chunk, position * inv_freq[i], which are the same in every layer.
void CpuTransformer::prepare_rotation(int64_t first_position, int64_t n_rows) {
  const int64_t half = config_.head_dim / 2;
  cosine_.resize(n_rows * half);
  sine_.resize(n_rows * half);
  for (int64_t row = 0; row < n_rows; ++row) {
    for (int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(first_position + row) * inv_freq_[i];
      cosine_[row * half + i] = std::cos(angle);
      sine_[row * half + i] = std::sin(angle);
    }
  }
}

// Applies RoPE by halves to the q and k heads of every row: dims i and i + head_dim / 2 turn by angle i.
void CpuTransformer::rotate_rows(int64_t n_rows) {
  const int64_t half = config_.head_dim / 2, n_heads = config_.n_q_heads + config_.n_kv_heads;
  for (int64_t row = 0; row < n_rows; ++row) {
    const float *cosine = &cosine_[row * half], *sine = &sine_[row * half];
    for (int64_t head = 0; head < n_heads; ++head) {
      float* x = &qkv_[row * config_.qkv_size() + head * config_.head_dim];
      for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
      }
    }
  }
}

}  // namespace generate
