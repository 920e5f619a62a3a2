// SPDX-License-Identifier: MIT
// Converts the oracle's layer to the backends' struct. `from` must outlive the result. The table for RoPE is the library's
// and stays empty.
#pragma once

#include "lib/model/layer.h"
#include "reference/reference_layer.h"

namespace tandem::test {

inline Layer layer_of(const reference::RefLayer& from) {
  Layer layer;
  layer.n_q_heads = from.n_q_heads;
  layer.n_kv_heads = from.n_kv_heads;
  layer.group_size = from.group_size();
  layer.k_head_dim = from.k_head_dim;
  layer.v_head_dim = from.v_head_dim;
  layer.v_aliases_k = from.v_aliases_k;
  layer.k_type = from.k_type;
  layer.v_type = from.v_type;
  layer.sm_scale = static_cast<float>(from.scale());
  layer.soft_cap = from.soft_cap;
  layer.sliding_window = from.sliding_window;
  layer.sinks = from.sinks.empty() ? nullptr : from.sinks.data();
  return layer;
}

}  // namespace tandem::test
