// SPDX-License-Identifier: MIT
#include "transformer.h"

#include <algorithm>
#include <cmath>

namespace generate {

int32_t Transformer::most_likely(int64_t row) {
  const float *first = logits(row, 1), *end = first + config_.vocab_size;
  if (!std::all_of(first, end, [](float logit) { return std::isfinite(logit); })) return -1;
  return static_cast<int32_t>(std::max_element(first, end) - first);
}

tandem_layer_options layer_options(const ModelConfig& config, bool library_rope) {
  tandem_layer_options options = TANDEM_LAYER_OPTIONS_INIT;
  options.n_q_heads = static_cast<int32_t>(config.n_q_heads);
  options.n_kv_heads = static_cast<int32_t>(config.n_kv_heads);
  options.k_head_dim = static_cast<int32_t>(config.head_dim);
  options.sliding_window_tokens = config.sliding_window_tokens;
  options.rope = library_rope ? TANDEM_ROPE_HALVES : TANDEM_ROPE_CALLER;
  options.rope_theta = config.rope_theta;
  return options;
}

tandem_tensor heads_view(void* data, int32_t dtype, int64_t n_tokens, int64_t n_heads, int64_t head_dim,
                         int64_t row_stride) {
  tandem_tensor tensor = {};
  tensor.struct_size = sizeof tensor;
  tensor.dtype = dtype;
  tensor.device_type = TANDEM_DEVICE_HOST;
  tensor.data = data;
  tensor.n_dims = 3;
  const int64_t shape[] = {n_tokens, n_heads, head_dim}, stride[] = {row_stride, head_dim, 1};
  std::copy_n(shape, 3, tensor.shape);
  std::copy_n(stride, 3, tensor.stride);
  return tensor;
}

tandem_tensor rows_view(void* data, int32_t dtype, int64_t n_tokens, int64_t row_size) {
  tandem_tensor tensor = heads_view(data, dtype, n_tokens, row_size, 1, row_size);
  tensor.n_dims = 2;
  return tensor;
}

Failure attend_chunk(const Chunk& chunk, int64_t layer_idx, const HeadsOfChunk& heads, void* stream) {
  const auto n_tokens = static_cast<int64_t>(chunk.tokens.size());
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.flags = chunk.flags;
  args.layer_idx = static_cast<int32_t>(layer_idx);
  args.n_sequences = 1;
  args.sequences = &chunk.sequence;
  args.q_lens = &n_tokens;
  args.q = &heads.q;
  args.k = &heads.k;
  args.v = &heads.v;
  args.o = &heads.o;
  if (heads.has_x) args.x = &heads.x;
  args.stream = stream;
  GENERATE_TANDEM(tandem_attend(chunk.session, &args, &error));
  return {};
}

std::vector<float> inverse_frequencies(const ModelConfig& config) {
  std::vector<float> frequencies;
  for (int64_t i = 0; i < config.head_dim / 2; ++i)
    frequencies.push_back(static_cast<float>(std::pow(config.rope_theta, -2.0 * i / config.head_dim)));
  return frequencies;
}

}  // namespace generate
