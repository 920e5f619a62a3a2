// SPDX-License-Identifier: MIT
// How a layer's keys and values are made from its hidden states, if the caller has said so (tandem_layer_projection). x is a
// token's hidden state, normalised and rounded to w_type:
//
//   k = rotate(x W_K + b_K)    v = x W_V + b_V
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lib/model/rope.h"
#include "tandem/tandem.h"

namespace tandem {

// Owned by the model, with all data that it points to. Vectors are f32 in host memory, null if absent.
struct Projection {
  int32_t hidden_dim = 0;
  int32_t w_type = 0;         // f16 or bf16
  bool is_out_by_in = false;  // W_K is [n_kv_heads * k_head_dim, hidden_dim]; else [hidden_dim, n_kv_heads * k_head_dim]
  bool is_on_device = false;  // both W are in the caller's device memory, else in host memory
  int32_t norm = 0;           // TANDEM_NORM_*
  float norm_eps = 0.0f;
  const void* w_k = nullptr;  // both null: sessions are told which blocks of offloaded weights they are
  const void* w_v = nullptr;
  const float* b_k = nullptr;          // [n_kv_heads * k_head_dim]
  const float* b_v = nullptr;          // [n_kv_heads * v_head_dim]
  const float* norm_weight = nullptr;  // [hidden_dim]
  const float* norm_bias = nullptr;
  const RopeTable* rope = nullptr;  // null: keys are not rotated
};

// A projection with the data that it points to.
struct OwnedProjection {
  Projection plain;
  std::vector<uint16_t> w_k, w_v;
  std::vector<float> b_k, b_v, norm_weight, norm_bias;
};

class LayerRefusal;
class Status;
Status check_projection(const tandem_layer_options& layer, const LayerRefusal& refuse);  // ok if there is none
// Copies the projection of a checked layer. rope: the angles of projected_rope(), null if that is 0.
std::unique_ptr<OwnedProjection> own_projection(const tandem_layer_options& layer, const RopeTable* rope);
int32_t projected_rope(const tandem_layer_options& layer);  // the caller's rotation of keys: k_rope; 0 without a projection

}  // namespace tandem
