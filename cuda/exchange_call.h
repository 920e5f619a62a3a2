// SPDX-License-Identifier: MIT
// What the kernels of append(), merge() and observe() get. The layers in the calls are the host's: kernels do not look at
// them.
#pragma once

#include "lib/tables/device.h"

namespace tandem::cuda {

// How rows are rotated: as in RopeTable; no pairs where they are not.
struct Rotation {
  const float* cos_sin;
  int32_t n_pairs, is_interleaved;
  float attn_factor;
};

struct AppendCall {
  DeviceAppend append;
  int32_t n_q_heads, n_kv_heads, group_size;
  int32_t k_dim, v_dim;
  int32_t k_type, v_type;
  int32_t k_four_bytes, v_four_bytes;   // of four numbers' codes
  int32_t token_rows;                   // of q, K and V together, that a token has here; of all tokens below 2^30
  int64_t row_bytes[kPlanes];           // as stored
  int64_t window_k_bytes;               // of a row of K in the window
  Rotation rotation;                    // where the library applies RoPE
  float hadamard_factor;                // 1 / sqrt(k_dim) where rows of K are rotated before they are rounded
  int32_t x_dim, x_type;                // of hidden states, which are the last of a token's rows, 256 numbers in each
  int32_t x_four_bytes, x_scale_bytes;  // of them: of four numbers' codes, of a group's scales, and
  int32_t x_group_fours;                // how many fours share these; 0: there are none
  int64_t x_bytes, x_scales_at;         // of one as stored; where its scales are in it
};

struct MergeCall {
  DeviceMerge merge;
  int32_t n_q_heads, group_size;
  int32_t dim;         // of V
  int64_t sent_epoch;  // of an append whose end is waited for; 0: it is not
};

struct AccumulateCall {
  DeviceAccumulate sum;
  int32_t n_q_heads;
  int32_t dim;  // of V
};

struct ObserveCall {
  DeviceObserve observe;
  int32_t n_q_heads, n_kv_heads, group_size;
  int32_t dim;     // of K
  int32_t n_runs;  // blocks of a sequence and KV head
  float sm_scale, soft_cap;
  int64_t row_bytes, scale_bytes;  // as stored
};

inline constexpr int kAppendWarps = 8, kAppendAloneWarps = 32;  // of a block; of the only block
inline constexpr int kAppendBesideWarps = 16;                   // of a block beside which attention runs
inline constexpr int kMostCopiedTokens = 512;                   // of such an append that copies rows as they are
inline constexpr int kMergeWarps = 8;
inline constexpr int kNameWarps = 8;
inline constexpr int kObserveWarps = 4, kObserveBlocks = 4;  // of a block; of a multiprocessor

}  // namespace tandem::cuda
