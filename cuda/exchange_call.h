// SPDX-License-Identifier: MIT
// The arguments of the kernels of append(), merge() and observe(). The layers in the calls are in host memory, and kernels
// do not read them.
#pragma once

#include "lib/tables/device.h"

namespace tandem::cuda {

// The rotation of rows, as in RopeTable. n_pairs is 0 where rows are not rotated.
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
  int32_t k_four_bytes, v_four_bytes;  // bytes of the codes of four numbers
  int32_t token_rows;                  // rows that a token has here, of q, K, V and hidden states; below 2^30 for all tokens
  int64_t row_bytes[kPlanes];          // as stored
  int64_t window_k_bytes;              // of a row of K in the window
  Rotation rotation;                   // where the library applies RoPE
  float hadamard_factor;               // 1 / sqrt(k_dim), where rows of K get a Hadamard rotation before they are rounded
  int32_t x_dim, x_type;               // of hidden states, which are a token's last rows, with 256 numbers a row
  int32_t x_four_bytes, x_scale_bytes;  // of hidden states: bytes of four numbers' codes; bytes of a group's scales
  int32_t x_group_fours;                // how many groups of four numbers share scales; 0: hidden states have no scales
  int64_t x_bytes, x_scales_at;         // bytes of a hidden state as stored; offset of its scales
};

struct MergeCall {
  DeviceMerge merge;
  int32_t n_q_heads, group_size;
  int32_t dim;         // dims of V
  int64_t sent_epoch;  // of an append whose end the merge waits for; 0: it waits for none
};

struct AccumulateCall {
  DeviceAccumulate sum;
  int32_t n_q_heads;
  int32_t dim;  // dims of V
};

struct ObserveCall {
  DeviceObserve observe;
  int32_t n_q_heads, n_kv_heads, group_size;
  int32_t dim;     // dims of K
  int32_t n_runs;  // blocks that share a sequence and KV head
  float sm_scale, soft_cap;
  int64_t row_bytes, scale_bytes;  // of a row of K as stored
};

inline constexpr int kAppendWarps = 8, kAppendAloneWarps = 32;  // warps of a block; of the only block of a small append
inline constexpr int kAppendBesideWarps = 16;                   // warps of a block of an append that attention runs beside
inline constexpr int kMostCopiedTokens = 512;                   // of such an append, where it copies rows as they are
inline constexpr int kMergeWarps = 8;
inline constexpr int kNameWarps = 8;
inline constexpr int kObserveWarps = 4, kObserveBlocks = 4;  // warps of a block; blocks on a multiprocessor

}  // namespace tandem::cuda
