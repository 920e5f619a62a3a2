// SPDX-License-Identifier: MIT
// The append of a few tokens beside which attention runs (DeviceAppend::epoch). It serves rows of K and V that are in the
// storage type already. Lanes copy 16 bytes each.
//
// Attention waits for the window's rows, so their path is short. The places of all tokens are found while the kernel before
// still ends. The code is short, too: it runs once, and comes from memory each time, because keys have taken its place in
// the caches.
#pragma once

#include "cuda/kernels/append.cuh"
#include "cuda/kernels/warp_ops.cuh"

namespace tandem::cuda {

struct TokenPlace {
  int64_t page;          // bytes from the page called 0
  int32_t slot_in_page;  // -1: the token is not resident
  int32_t sequence_idx;  // -1: the token belongs to no sequence, as in a replay with fewer tokens
};

__device__ inline TokenPlace place_token(const AppendCall& call, int token) {
  TokenPlace place = {0, -1, -1};
  const DeviceSequences& all = call.append.sequences;
#pragma unroll 1
  for (int s = 0; s < all.n_sequences; ++s)
    if (token >= all.sequences[s].first_row && token < all.sequences[s].first_row + all.sequences[s].q_len)
      place.sequence_idx = s;
  if (place.sequence_idx < 0) return place;
  const DeviceSequence& sequence = all.sequences[place.sequence_idx];
  const int64_t key = sequence.end - sequence.q_len + (token - sequence.first_row);
  if (key < sequence.begin) return place;
  const auto page_len = static_cast<uint32_t>(call.append.pages.page_len), at_key = static_cast<uint32_t>(key);
  const uint32_t page_idx = at_key / page_len;
  place.slot_in_page = static_cast<int32_t>(at_key - page_idx * page_len);
  place.page = all.page_tables[sequence.table_begin + page_idx % static_cast<uint32_t>(sequence.table_len)];
  return place;
}

// Sixteen bytes of a row of K or V: source and destination.
struct CopiedUnit {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;  // null: not copied
  int32_t type = 0;
};

// Finds a unit of 16 bytes. slot: null to copy to the window.
__device__ inline CopiedUnit find_copied_unit(const AppendCall& call, const TokenPlace* places, std::byte* slot, int unit) {
  const DeviceAppend& append = call.append;
  const int k_units = static_cast<int>(call.row_bytes[kPlaneK]) / 16,
            v_units = static_cast<int>(call.row_bytes[kPlaneV]) / 16;
  const int of_keys = call.n_kv_heads * k_units, per_token = of_keys + call.n_kv_heads * v_units;
  const int token = divide(unit, per_token), in_token = unit - token * per_token;
  if (token >= append.n_tokens) return {};
  const bool is_v = in_token >= of_keys;
  const int in_plane = in_token - (is_v ? of_keys : 0), of_row = is_v ? v_units : k_units;
  const int head = divide(in_plane, of_row), piece = in_plane - head * of_row, p = is_v ? kPlaneV : kPlaneK;
  const DeviceRows& rows = is_v ? append.v : append.k;
  const TokenPlace place = places[token];
  CopiedUnit found;
  found.type = rows.dtype;
  found.from = static_cast<const std::byte*>(rows.data) +
               (token * rows.token_stride + head * rows.head_stride) * number_bytes(rows.dtype) + 16 * piece;
  if (slot != nullptr && place.sequence_idx >= 0)
    found.to =
        slot + append.exchange.rows_at[p] + (int64_t{head} * append.exchange.n_rows + token) * (16 * of_row) + 16 * piece;
  if (slot == nullptr && place.slot_in_page >= 0)
    found.to = append.pages.planes[p] + place.page + head * append.pages.head_stride[p] +
               int64_t{place.slot_in_page} * (16 * of_row) + 16 * piece;
  return found;
}

// Copies the block's units of K and V to the window, or to the slot if it is not null.
__device__ inline void copy_units(const AppendCall& call, const TokenPlace* places, std::byte* slot) {
  constexpr int kAtOnce = 4;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  const int of_token = call.n_kv_heads * static_cast<int>(call.row_bytes[kPlaneK] + call.row_bytes[kPlaneV]) / 16;
  const int n_units = call.append.n_tokens * of_token;
#pragma unroll 1
  for (int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); first < n_units; first += kAtOnce * step) {
    CopiedUnit units[kAtOnce];
    uint4 found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      units[i] = find_copied_unit(call, places, slot, first + i * step);
      if (units[i].to != nullptr) found[i] = *reinterpret_cast<const uint4*>(units[i].from);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (units[i].to != nullptr) *reinterpret_cast<uint4*>(units[i].to) = quiet_numbers(units[i].type, found[i]);
  }
}

// Copies the queries of sequences that have a host part to the slot, four numbers a lane.
__device__ inline void send_queries(const AppendCall& call, const TokenPlace* places, std::byte* slot) {
  const int of_row = call.k_dim / kLaneNumbers, of_token = call.n_q_heads * of_row;
  const int n_fours = call.append.n_tokens * of_token, step = static_cast<int>(gridDim.x * blockDim.x);
  auto* const to = reinterpret_cast<float*>(slot + call.append.exchange.q_at);
#pragma unroll 4
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < n_fours; i += step) {
    const int token = divide(i, of_token), in_token = i - token * of_token, head = divide(in_token, of_row);
    const int first = kLaneNumbers * (in_token - head * of_row), s = places[token].sequence_idx;
    if (s < 0 || call.append.sequences.sequences[s].has_host_part == 0) continue;
    const DeviceRows& q = call.append.q;
    float x[kLaneNumbers];
    widen_four(q.dtype, load_four(q.data, q.dtype, token * q.token_stride + head * q.head_stride + first), x);
    const int64_t row = host_row(call.append.sequences.sequences[s], token, head, call.n_q_heads, call.group_size);
    *reinterpret_cast<float4*>(to + row * call.k_dim + first) = make_float4(x[0], x[1], x[2], x[3]);
  }
}

__global__ void __launch_bounds__(32 * kAppendBesideWarps) append_copy_kernel(const __grid_constant__ AppendCall call) {
  __shared__ TokenPlace places[kMostCopiedTokens];
  __shared__ Word ticket;
  __shared__ bool is_free;
  let_next_start();
  const DeviceExchange& exchange = call.append.exchange;
  for (int t = static_cast<int>(threadIdx.x); t < call.append.n_tokens; t += static_cast<int>(blockDim.x))
    places[t] = place_token(call, t);
  const bool has_host = has_host_part(call.append.sequences) && call.append.q.data != nullptr;
  __syncthreads();
  wait_for_before();
  Standing standing = {};
  if (threadIdx.x == 0) standing = load_standing(exchange);
  std::byte* slot = nullptr;
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    copy_units(call, places, slot);
    if (round == 1) break;
    say_rows_written(exchange, call.append.epoch);
    if (threadIdx.x == 0) {
      ticket = standing.next_ticket;
      is_free = wait_for_slot(exchange, standing);
    }
    __syncthreads();
    if (!is_free) return;
    slot = slot_of(exchange, ticket);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) store_header(call, ticket, slot);
  if (has_host) send_queries(call, places, slot);
  hand_over(exchange, ticket, call.append.epoch);
}

}  // namespace tandem::cuda
