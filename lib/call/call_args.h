// SPDX-License-Identifier: MIT
// The checked arguments of a session's callers: shapes agree with the model and with each other, and nothing overlaps.
#pragma once

#include <cstdint>
#include <span>

#include "lib/base/tensor_view.h"
#include "lib/call/named_keys.h"
#include "lib/tables/backend.h"
#include "lib/tables/device.h"

namespace tandem {

struct AttendArgs {
  int32_t layer_idx = 0;
  bool speculative = false;
  bool partial = false;
  int32_t n_sequences = 0;
  const int64_t* sequences = nullptr;   // [n_sequences]
  const int64_t* q_lens = nullptr;      // [n_sequences]
  const int32_t* parent_idx = nullptr;  // [n_tokens] or null
  TensorView q, o;                      // [n_tokens, n_q_heads, ...]
  const TensorView* k = nullptr;        // null: nothing is appended
  const TensorView* v = nullptr;        // null where V aliases K, or nothing is appended
  const TensorView* x = nullptr;        // null where the layer keeps no hidden states, or nothing is appended
  float* lse = nullptr;                 // null: not wanted
  int64_t lse_token_stride = 0;         // elements
  int64_t lse_head_stride = 0;
  bool on_device = false;            // every tensor is in the device's memory
  void* stream = nullptr;            // with on_device, the stream of the call; NULL is the default stream
  const NamedKeys* named = nullptr;  // the keys that queries attend; null: those of the policy
  bool is_watched = false;           // `watch` has a cancel flag or a progress function
  Watch watch;
};

// Views of a tensor: as kernels take it, and its rows [row, row + n_rows).
inline DeviceRows rows_of(const TensorView& view) {
  const int64_t bytes = row_bytes(view.dtype, 1);
  return {view.data, view.dtype, 0, view.token_stride / bytes, view.head_stride / bytes};
}
inline TensorView from_row(const TensorView& view, int64_t row, int64_t n_rows) {
  TensorView part = view;
  part.data += row * view.token_stride;
  part.n_tokens = n_rows;
  return part;
}

// Some rows of a call's tensors, as a call of their own.
struct CutArgs {
  AttendArgs args;
  TensorView k, v, x;

  CutArgs(const AttendArgs& whole, int64_t first_row, int64_t n_rows) : args(whole) {
    args.q = from_row(whole.q, first_row, n_rows);
    args.o = from_row(whole.o, first_row, n_rows);
    if (whole.k != nullptr) k = from_row(*whole.k, first_row, n_rows), args.k = &k;
    if (whole.v != nullptr) v = from_row(*whole.v, first_row, n_rows), args.v = &v;
    if (whole.x != nullptr) x = from_row(*whole.x, first_row, n_rows), args.x = &x;
    if (args.lse != nullptr) args.lse += first_row * args.lse_token_stride;
  }
  CutArgs(const CutArgs&) = delete;
};

// Calls that may be made later: sequences of kv_lens tokens, of which the last q_lens are new.
struct CallsAhead {
  size_t layer_idx = 0;
  std::span<const int64_t> kv_lens;
  const int64_t* q_lens = nullptr;  // null: 1 each

  int64_t q_len(size_t i) const { return q_lens != nullptr ? q_lens[i] : 1; }
};

// Names a head for which a caller lists the kept keys.
struct HeadOfSequence {
  int64_t sequence;
  int32_t layer_idx;
  int32_t kv_head;
  int32_t q_head_of_group;
};

// Receives kept keys in ascending order. Stores as many as fit into the caller's arrays and counts all of them.
struct KeptKeys {
  int64_t* token_idx;  // [capacity]
  float* maw;          // [capacity], or null: not wanted
  int64_t capacity;
  int64_t n = 0;

  void put(int64_t token, float share) {
    if (n < capacity) {
      token_idx[n] = token;
      if (maw != nullptr) maw[n] = share;
    }
    ++n;
  }
};

}  // namespace tandem
