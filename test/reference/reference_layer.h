// SPDX-License-Identifier: MIT
// Geometry of a layer for the oracle: tandem_layer_options with its defaults filled in.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "tandem/tandem.h"

namespace reference {

struct RefLayer {
  int32_t n_q_heads = 1;
  int32_t n_kv_heads = 1;
  int32_t k_head_dim = 64;
  int32_t v_head_dim = 64;
  bool v_aliases_k = false;
  int32_t k_type = TANDEM_F32;
  int32_t v_type = TANDEM_F32;
  float sm_scale = 0.0f;  // 0: default
  float soft_cap = 0.0f;
  int64_t sliding_window = 0;
  std::vector<float> sinks;  // [n_q_heads] or empty
  int32_t rope = TANDEM_ROPE_CALLER;
  int32_t rope_dims = 0;  // 0: k_head_dim
  double rope_theta = 0.0;
  double rope_position_scale = 0.0;
  std::vector<float> rope_inv_freq;  // [rope_dims / 2] or empty
  double rope_attn_factor = 0.0;

  int32_t group_size() const { return n_q_heads / n_kv_heads; }
  double scale() const { return sm_scale != 0.0f ? static_cast<double>(sm_scale) : 1.0 / std::sqrt(k_head_dim); }
  int32_t rotated_dims() const { return rope_dims ? rope_dims : k_head_dim; }
  double attn_factor() const { return rope_attn_factor != 0.0 ? rope_attn_factor : 1.0; }
  // The angle of pair i at a position is scaled(position) * frequency(i).
  double scaled(int64_t position) const {
    return static_cast<double>(position) / (rope_position_scale != 0.0 ? rope_position_scale : 1.0);
  }
  double frequency(int32_t i) const {
    if (!rope_inv_freq.empty()) return static_cast<double>(rope_inv_freq[static_cast<size_t>(i)]);
    return std::pow(rope_theta != 0.0 ? rope_theta : 10000.0, -2.0 * i / rotated_dims());
  }
};

}  // namespace reference
