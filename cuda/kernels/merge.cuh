// SPDX-License-Identifier: MIT
// Merges the states of the window and of the host and the learned sink into one, row by row.
//
//   m = max lse_i;  w_i = exp(lse_i - m);  o = sum w_i o_i / sum w_i;  lse = m + log(sum w_i)
//
// A state with lse = -inf is empty, and its o is not read. If all are empty the result is (0, -inf). NaN passes on. A
// single state comes out bit for bit. Where observe() follows, the merged lse replace the lse of the window and of the
// host.
//
// A block has rows of one token, and so of one sequence. It waits for the host only where that sequence has a host part.
// Meanwhile it loads the window's states. It reads the host's states across the bus, from the slot.
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/kernels/round.cuh"

namespace tandem::cuda {

// A lane's part of a row's state, four numbers at a time (round.cuh).
struct RowState {
  float lse = -INFINITY;
  float o[kFours][kLaneNumbers] = {};
};

__device__ inline RowState load_state(const float* o, const float* lse, int64_t row, int dim) {
  RowState state;
  state.lse = lse[row];
#pragma unroll
  for (int j = 0; j < kFours; ++j)
    if (first_of_four(j) < dim) widen_four(TANDEM_F32, load_four(o, TANDEM_F32, row * dim + first_of_four(j)), state.o[j]);
  return state;
}

// Loads the host's state of a row. The caller is behind a barrier after an acquire, so plain loads see what the host has
// written. Loads that are ordered one by one cross the bus one by one, and take three times as long.
__device__ inline RowState load_host(const MergeCall& call, const std::byte* slot, int64_t row) {
  const DeviceExchange& exchange = call.merge.exchange;
  const float* const o = reinterpret_cast<const float*>(slot + exchange.o_at) + row * call.dim;
  RowState state;
  float4 four[kFours];
#pragma unroll
  for (int j = 0; j < kFours; ++j)
    if (first_of_four(j) < call.dim) four[j] = *reinterpret_cast<const float4*>(o + first_of_four(j));
  state.lse = reinterpret_cast<const float*>(slot + exchange.lse_at)[row];
#pragma unroll
  for (int j = 0; j < kFours; ++j)
    if (first_of_four(j) < call.dim)
      state.o[j][0] = four[j].x, state.o[j][1] = four[j].y, state.o[j][2] = four[j].z, state.o[j][3] = four[j].w;
  return state;
}

__device__ inline float weight_of(float lse, float most) { return lse == -INFINITY ? 0.0f : expf(lse - most); }

__device__ inline RowState merge_states(const RowState& a, const RowState& b, float sink) {
  const float most = fmaxf(fmaxf(a.lse, b.lse), sink);
  const float of_a = weight_of(a.lse, most), of_b = weight_of(b.lse, most);
  const float sum = of_a + of_b + weight_of(sink, most);
  RowState merged;
  if (sum == 0.0f) return merged;
  merged.lse = most + logf(sum);
  const bool has_a = a.lse != -INFINITY, has_b = b.lse != -INFINITY;
  const float share_a = of_a / sum, share_b = of_b / sum;
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < kLaneNumbers; ++i) {
      if (has_a) merged.o[j][i] = share_a * a.o[j][i];
      if (has_b) merged.o[j][i] = has_a ? fmaf(share_b, b.o[j][i], merged.o[j][i]) : share_b * b.o[j][i];
    }
  return merged;
}

__device__ inline RowState nan_state() {
  RowState state;
  state.lse = NAN;
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < kLaneNumbers; ++i) state.o[j][i] = NAN;
  return state;
}

__device__ inline void store_state(const MergeCall& call, int token, int head, const RowState& state) {
  const DeviceMerge& merge = call.merge;
  const int64_t o = token * merge.o_out.token_stride + head * merge.o_out.head_stride;
#pragma unroll
  for (int j = 0; j < kFours; ++j)
    if (first_of_four(j) < call.dim) store_four(merge.o_out.data, merge.o_out.dtype, o + first_of_four(j), state.o[j]);
  if (threadIdx.x % 32 == 0 && merge.lse_out != nullptr)
    merge.lse_out[token * merge.lse_token_stride + head * merge.lse_head_stride] = state.lse;
}

// Adds states to states. A warp has a row of them, or several.
__global__ void __launch_bounds__(32 * kMergeWarps) accumulate_kernel(const __grid_constant__ AccumulateCall call) {
  begin_behind();
  const DeviceAccumulate& sum = call.sum;
  const int64_t n_rows = int64_t{sum.n_rows} * sum.n_heads;
  for (int64_t i = int64_t{blockIdx.x} * kMergeWarps + threadIdx.x / 32; i < n_rows; i += int64_t{gridDim.x} * kMergeWarps) {
    const int64_t row = (sum.first_row + i / sum.n_heads) * call.n_q_heads + sum.first_head + i % sum.n_heads;
    const RowState part = load_state(sum.part_o, sum.part_lse, row, call.dim);
    if (part.lse == -INFINITY) continue;
    const RowState merged = merge_states(load_state(sum.o, sum.lse, row, call.dim), part, -INFINITY);
#pragma unroll
    for (int j = 0; j < kFours; ++j)
      if (first_of_four(j) < call.dim) store_four(sum.o, TANDEM_F32, row * call.dim + first_of_four(j), merged.o[j]);
    __syncwarp();  // all lanes have read the lse that lane 0 writes next
    if (threadIdx.x % 32 == 0) sum.lse[row] = merged.lse;
  }
}

__global__ void __launch_bounds__(32 * kMergeWarps) merge_kernel(const __grid_constant__ MergeCall call) {
  __shared__ bool is_answered;
  let_next_start();
  const DeviceExchange& exchange = call.merge.exchange;
  const int token = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y * kMergeWarps + threadIdx.x / 32);
  const bool has_row = head < call.n_q_heads;
  const int sequence_idx = find_sequence(call.merge.sequences, token);
  const DeviceSequence& sequence = call.merge.sequences.sequences[max(sequence_idx, 0)];
  const bool has_host_part = sequence_idx >= 0 && sequence.has_host_part != 0;
  const bool asks = has_host_part && blockIdx.y == 0 && token == sequence.first_row &&
                    is_first_to_wait(call.merge.sequences, sequence_idx);
  wait_for_before();
  // Clears the epochs. A replay of this layer has the same epoch, and its attention would take the old word for that of its
  // own append.
  if (token == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    if (call.sent_epoch != 0) wait_until_sent(exchange, call.sent_epoch);
    *word(exchange, kRowsWritten) = *word(exchange, kRowsSent) = 0;
  }
  if (sequence_idx < 0) return;  // in replays with fewer tokens
  if (!has_host_part && call.merge.leaves_finished != 0) return;
  const Standing standing = load_standing(exchange);
  const Word n_tickets = standing.next_ticket;
  RowState window;
  if (has_row) window = load_state(call.merge.o, call.merge.lse, int64_t{token} * call.n_q_heads + head, call.dim);
  bool is_sound = standing.fault == 0;
  if (has_host_part) {  // the same in the whole block
    if (threadIdx.x == 0) {
      const Word n_answered = wait_for_answers(exchange, standing, n_tickets, kFaultAnswer, asks);
      is_answered = n_answered != 0 && !is_lost(n_answered, n_tickets - 1);
    }
    __syncthreads();
    is_sound = is_answered;
  }
  if (!has_row) return;
  if (!is_sound) return store_state(call, token, head, nan_state());
  RowState host;
  if (has_host_part)
    host =
        load_host(call, slot_of(exchange, n_tickets - 1), host_row(sequence, token, head, call.n_q_heads, call.group_size));
  const float sink = call.merge.sinks == nullptr ? -INFINITY : call.merge.sinks[head];
  const RowState merged = merge_states(window, host, sink);
  store_state(call, token, head, merged);
  __syncwarp();  // all lanes have read the lse that lane 0 writes next
  if (call.merge.is_observed == 0 || threadIdx.x % 32 != 0) return;
  call.merge.lse[int64_t{token} * call.n_q_heads + head] = merged.lse;
  if (!has_host_part || sequence.wants_lse == 0) return;
  const int64_t row = host_row(sequence, token, head, call.n_q_heads, call.group_size);
  reinterpret_cast<float*>(slot_of(exchange, n_tickets - 1) + exchange.lse_at)[row] = merged.lse;
}

}  // namespace tandem::cuda
