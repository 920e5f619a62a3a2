// SPDX-License-Identifier: MIT
// The rows of a cache: finds keys, writes and moves rows.
#pragma once

#include <cstdint>

#include "lib/base/tensor_view.h"
#include "lib/store/sequence_table.h"
#include "lib/tensors/convert.h"

namespace tandem {

// Consecutive rows of an append's K, V and hidden states.
struct AppendedRows {
  const TensorView* k;
  const TensorView* v;  // null where V aliases K
  const TensorView* x;  // null where the layer keeps none
  int64_t first_row;
  int64_t n_rows;
  Watch watch = {};  // once cancelled, writes no more rows
};

// key_tokens() returns the longest prefix of `tokens` whose rows are contiguous in memory and, if the library rotates, whose
// positions are consecutive. keys_of() returns one head's keys there, as kernels read them.
TokenRun key_tokens(const StoreView& view, const Layer& layer, TokenRange tokens);
KvRun keys_of(const StoreView& view, const Layer& layer, int32_t layer_idx, const TokenRun& at, int32_t kv_head);
// Writes to tokens first, first + 1, ... Needs no exclusive lock, as no reader looks beyond the length.
void write_rows(const SequenceTable& cache, const Sequence& sequence, int32_t layer_idx, int64_t first,
                const AppendedRows& rows);
inline void move_row(const SequenceTable& cache, const Sequence& sequence, int32_t layer_idx, int64_t from, int64_t to) {
  copy_tokens(cache.view(sequence), from, cache.view(sequence), to, layer_idx, 1);
}

// K and V of a token in a store's planes.
inline StoredRow stored_k(const Layer& layer, const Rows& rows) {
  return {layer.k_type, rows.of[kPlaneK], rows.of[kPlaneKScales], layer.k_rotation};
}
inline StoredRow stored_v(const Layer& layer, const Rows& rows) {
  return {layer.v_type, rows.v(layer), rows.v_scales(layer)};
}

}  // namespace tandem
