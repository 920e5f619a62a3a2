// SPDX-License-Identifier: MIT
// Geometry of one layer as kernels need it: validated, with defaults filled in and storage types attached.
#pragma once

#include <cstdint>

#include "lib/model/dtype.h"
#include "lib/model/projection.h"
#include "lib/model/rope.h"
#include "tandem/tandem.h"

namespace tandem {

struct Layer {
  int32_t n_q_heads = 0;
  int32_t n_kv_heads = 0;
  int32_t group_size = 0;  // n_q_heads / n_kv_heads
  int32_t k_head_dim = 0;
  int32_t v_head_dim = 0;
  bool v_aliases_k = false;  // V is the first v_head_dim dims of K: KvRun::v == KvRun::k, v rows have K's stride
  int32_t k_type = 0;
  int32_t v_type = 0;                         // = k_type where V aliases K
  int64_t k_stride = 0, v_stride = 0;         // bytes from a row of a run to the next; 0: rows lie side by side
  int32_t k_rotation = TANDEM_ROTATION_NONE;  // rotation of stored K; q is rotated likewise before a backend gets it
  float sm_scale = 1.0f;
  float soft_cap = 0.0f;                   // 0: off
  int64_t sliding_window = 0;              // 0: off
  const float* sinks = nullptr;            // [n_q_heads] or null
  const RopeTable* rope = nullptr;         // null: stored keys are used as they are
  const Projection* projection = nullptr;  // null: the caller has not said how K and V are made
  int32_t x_type = 0;                      // type of the hidden states that a cache keeps; 0: it keeps none
  int32_t hidden_dim() const { return x_type != 0 ? projection->hidden_dim : 0; }  // of the kept hidden states
  // Bytes of one hidden state: its codes, followed by its scales in types with groups.
  int64_t x_bytes() const { return x_type == 0 ? 0 : x_code_bytes() + scale_bytes(x_type, hidden_dim()); }
  int64_t x_code_bytes() const { return x_type == 0 ? 0 : row_bytes(x_type, hidden_dim()); }
  bool operator==(const Layer& other) const = default;
};

// The layer for a caller that works query head by query head: each query head has its own KV head.
inline Layer by_q_head(Layer layer) {
  layer.n_kv_heads = layer.n_q_heads;
  layer.group_size = 1;
  return layer;
}

// Bytes from one row of a run to the next.
constexpr int64_t k_stride_of(const Layer& layer) {
  return layer.k_stride > 0 ? layer.k_stride : row_bytes(layer.k_type, layer.k_head_dim);
}
constexpr int64_t v_stride_of(const Layer& layer) {
  if (layer.v_aliases_k) return k_stride_of(layer);
  return layer.v_stride > 0 ? layer.v_stride : row_bytes(layer.v_type, layer.v_head_dim);
}

}  // namespace tandem
