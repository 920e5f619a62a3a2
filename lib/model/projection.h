// SPDX-License-Identifier: MIT
// How a layer's keys and values come from its hidden states, where the caller has said so (tandem_layer_projection): with x
// a token's hidden state, normalised and rounded to w_type,
//
//   k = rotate(x W_K + b_K)    v = x W_V + b_V
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lib/model/rope.h"
#include "tandem/tandem.h"

namespace tandem {

// The model's: everything is there as long as it is. Vectors are f32 in host memory, null where there is none.
struct Projection {
  int32_t hidden_dim = 0;
  int32_t w_type = 0;         // f16 or bf16
  bool is_out_by_in = false;  // W_K is [n_kv_heads * k_head_dim, hidden_dim]; else [hidden_dim, n_kv_heads * k_head_dim]
  bool is_on_device = false;  // both W are in the caller's device memory, else in host memory
  int32_t norm = 0;           // TANDEM_NORM_*
  float norm_eps = 0.0f;
  const void* w_k = nullptr;  // both null: blocks of offloaded weights, of which sessions are told
  const void* w_v = nullptr;
  const float* b_k = nullptr;          // [n_kv_heads * k_head_dim]
  const float* b_v = nullptr;          // [n_kv_heads * v_head_dim]
  const float* norm_weight = nullptr;  // [hidden_dim]
  const float* norm_bias = nullptr;
  const RopeTable* rope = nullptr;  // null: keys are not rotated
};

// With what it points to.
struct OwnedProjection {
  Projection plain;
  std::vector<uint16_t> w_k, w_v;
  std::vector<float> b_k, b_v, norm_weight, norm_bias;
};

class LayerRefusal;
class Status;
Status check_projection(const tandem_layer_options& layer, const LayerRefusal& refuse);  // which may have none
// Of a layer that has been checked. rope: the angles of projected_rope(), null where it is 0.
std::unique_ptr<OwnedProjection> own_projection(const tandem_layer_options& layer, const RopeTable* rope);
int32_t projected_rope(const tandem_layer_options& layer);  // how the caller rotates keys: k_rope; 0 without a projection

}  // namespace tandem
