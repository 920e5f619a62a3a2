// SPDX-License-Identifier: MIT
// Writes new rows to the window and to the host's slot, and queries to the slot.
//
// A warp takes a row at a time: one head of q, K or V of one token. The line of all rows is q's heads, K's heads, V's heads
// and the hidden state of the first token, then of the next. A lookup in device memory finds the token's sequence, and with
// it the places of its rows. Rows of K and V are rounded once and written twice:
//
//   window   planes[p] + page + head * head_stride[p] + slot * row_bytes[p]      where the token is resident
//   slot     rows_at[p] + (head * n_rows + row) * row_bytes[p]                 always: the host's store has every token
//
// Where the library applies RoPE (rotate.cuh), the window has K as f32, rotated. Where keys are rotated by a Walsh-Hadamard
// matrix, window and slot have them rotated, then rounded. In both cases the rotated queries go to rotated_q and to the
// slot.
//
// Hidden states, where the layer keeps them, go to the host alone. They are long: a warp takes kWarpRow numbers of one.
//
//   slot     x_at + row * row bytes: the row's codes, then its scales
//
// Indices of keys that the caller names go to the host unchanged, one warp for each token and head.
//
// A block loads its first rows while it waits for its slot. Where all keys of a step are in the window, the host needs no
// queries, and the warps skip them.
//
// Where attention runs beside the append (DeviceAppend::epoch), the window gets its rows first, as attention waits for
// them. The rest crosses the bus and takes longer. Such an append has few blocks, and attention leaves it their
// multiprocessors.
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/kernels/rotate.cuh"

namespace tandem::cuda {

inline constexpr int kWarpRow = kFours * kWarpNumbers;

// The rotation of queries and keys.
enum class Rotates { kNothing, kByPosition, kHadamard };

// A row: its source, and its place in the window.
struct NewRow {
  int sequence_idx;  // -1: the row is not stored, as in a replay with fewer tokens
  int token;         // index in the call
  int head;
  bool is_query, is_hidden;
  int plane;            // of a row of K or V: kPlaneK or kPlaneV
  bool is_resident;     // of a row of K or V: it is written to a page
  int slot_in_page;     // of a resident row
  int64_t page;         // of a resident row: bytes from the page called 0, negative if the page lies before that
  uint4 fours[kFours];  // as they are in the tensor; 0 behind the end of the row
};

__device__ inline const DeviceRows& source_of(const AppendCall& call, const NewRow& row) {
  return row.is_hidden ? call.append.x : row.is_query ? call.append.q : row.plane == kPlaneK ? call.append.k : call.append.v;
}
__device__ inline int dim_of(const AppendCall& call, const NewRow& row) {
  if (row.is_hidden) return min(kWarpRow, call.x_dim - row.head * kWarpRow);
  return row.is_query || row.plane == kPlaneK ? call.k_dim : call.v_dim;
}
// Not inlined: the code is long, and a call that runs it once fetches it from memory.
__device__ __noinline__ StoredFour round_numbers(int32_t type, float4 x) {
  const float numbers[kLaneNumbers] = {x.x, x.y, x.z, x.w};
  return round_four(type, numbers);
}
__device__ inline StoredFour round_numbers(int32_t type, const float (&x)[kLaneNumbers]) {
  return round_numbers(type, make_float4(x[0], x[1], x[2], x[3]));
}

// True if any sequence of the call has a host part. Whole warps call it.
__device__ inline bool has_host_part(const DeviceSequences& sequences) {
  bool has_any = false;
  for (int i = static_cast<int>(threadIdx.x % 32); i < sequences.n_sequences; i += 32)
    has_any |= sequences.sequences[i].has_host_part != 0 && sequences.sequences[i].q_len > 0;
  return __any_sync(~0u, has_any);
}

// The rows that the warps of a grid take in turn. From each token's line these are the first n_front rows, and, after a gap
// of n_skipped rows, the rest.
struct RowLine {
  int n_front, n_skipped, per_token;

  // All rows, without queries where the host needs none.
  template <Rotates kRotates>
  __device__ static RowLine of_all(const AppendCall& call) {
    const int n_skipped = wants_queries<kRotates>(call) ? 0 : n_queries(call);
    return {0, n_skipped, call.token_rows - n_skipped};
  }
  // Rows of K and V.
  __device__ static RowLine of_keys(const AppendCall& call) { return {0, n_queries(call), 2 * call.n_kv_heads}; }
  // All rows but those of K and V.
  template <Rotates kRotates>
  __device__ static RowLine of_others(const AppendCall& call) {
    const int n_front = wants_queries<kRotates>(call) ? n_queries(call) : 0, n_keys = 2 * call.n_kv_heads;
    return {n_front, n_queries(call) - n_front + n_keys, call.token_rows - n_queries(call) + n_front - n_keys};
  }

  template <Rotates kRotates>
  __device__ static bool wants_queries(const AppendCall& call) {
    return kRotates != Rotates::kNothing || has_host_part(call.append.sequences);
  }
  __device__ static int n_queries(const AppendCall& call) { return call.append.q.data != nullptr ? call.n_q_heads : 0; }
};

// Finds the at-th row of the line. Reads only data that no kernel writes (lib/tables/device.h). Behind the line's end the
// row is empty.
template <Rotates kRotates>
__device__ inline NewRow find_new_row(const AppendCall& call, const RowLine& line, int at) {
  NewRow row = {};
  row.sequence_idx = -1;
  if (at >= call.append.n_tokens * line.per_token) return row;
  row.token = at / line.per_token;
  row.head = at - row.token * line.per_token;
  if (row.head >= line.n_front) row.head += line.n_skipped;
  const int n_queries = RowLine::n_queries(call);
  row.is_query = row.head < n_queries;
  if (!row.is_query) {
    row.head -= n_queries;
    row.is_hidden = row.head >= 2 * call.n_kv_heads;
    row.plane = row.head < call.n_kv_heads ? kPlaneK : kPlaneV;
    row.head = row.is_hidden ? row.head - 2 * call.n_kv_heads : row.head % call.n_kv_heads;
  }
  row.sequence_idx = find_sequence(call.append.sequences, row.token);
  if (row.sequence_idx < 0 || row.is_hidden) return row;
  const DeviceSequence& sequence = call.append.sequences.sequences[row.sequence_idx];
  if (row.is_query) {
    if (kRotates == Rotates::kNothing && sequence.has_host_part == 0) row.sequence_idx = -1;
    return row;
  }
  const int64_t key = sequence.end - sequence.q_len + (row.token - sequence.first_row);
  row.is_resident = key >= sequence.begin;
  const auto page_len = static_cast<uint32_t>(call.append.pages.page_len), at_key = static_cast<uint32_t>(key);
  const uint32_t page_idx = at_key / page_len;  // keys are below 2^31; a 64-bit division takes five times as long
  row.slot_in_page = static_cast<int>(at_key - page_idx * page_len);
  if (row.is_resident)
    row.page =
        call.append.sequences.page_tables[sequence.table_begin + page_idx % static_cast<uint32_t>(sequence.table_len)];
  return row;
}

// Starts to load the row's numbers.
__device__ inline void load_new_row(const AppendCall& call, NewRow& row) {
  if (row.sequence_idx < 0) return;
  const DeviceRows& from = source_of(call, row);
  const int dim = dim_of(call, row);
  const int64_t first = row.token * from.token_stride + row.head * (row.is_hidden ? kWarpRow : from.head_stride);
#pragma unroll
  for (int j = 0; j < kFours; ++j)
    if (first_of_four(j) < dim) row.fours[j] = load_four(from.data, from.dtype, first + first_of_four(j));
}

// Writes a query to the slot, where the host has a part, and rotated to rotated_q. room: shared memory of the warp, where
// positions rotate; else null.
template <Rotates kRotates>
__device__ inline void store_query(const AppendCall& call, const NewRow& row, std::byte* slot, float* room) {
  const DeviceSequence& sequence = call.append.sequences.sequences[row.sequence_idx];
  if (sequence.has_host_part == 0 && kRotates == Rotates::kNothing) return;
  float x[kFours][kLaneNumbers];
#pragma unroll
  for (int j = 0; j < kFours; ++j) widen_four(call.append.q.dtype, row.fours[j], x[j]);
  if constexpr (kRotates == Rotates::kByPosition) rotate_row(call.rotation, position_of(call, sequence, row.token), x, room);
  if constexpr (kRotates == Rotates::kHadamard) hadamard_row(call.k_dim, call.hadamard_factor, x);
  if constexpr (kRotates != Rotates::kNothing) {
    store_floats(call.append.rotated_q + (int64_t{row.token} * call.n_q_heads + row.head) * call.k_dim, x, call.k_dim);
  }
  if (sequence.has_host_part == 0) return;
  const int64_t to = host_row(sequence, row.token, row.head, call.n_q_heads, call.group_size);
  store_floats(reinterpret_cast<float*>(slot + call.append.exchange.q_at) + to * call.k_dim, x, call.k_dim);
}

// The destinations that a row of K or V is written to.
enum class WritesTo { kBoth, kWindow, kSlot };

// The destinations of a row of K or V, in the plane of its codes and in that of its scales. host is null without a slot,
// and window is null where the token is not resident.
struct Destination {
  std::byte *host[2], *window[2];
};
__device__ inline Destination find_destination(const AppendCall& call, const NewRow& row, std::byte* slot) {
  const DeviceAppend& append = call.append;
  Destination to;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int p = row.plane + i;
    const int64_t bytes = call.row_bytes[p], in_window = p == kPlaneK ? call.window_k_bytes : bytes;
    to.host[i] = slot == nullptr
                     ? nullptr
                     : slot + append.exchange.rows_at[p] + (int64_t{row.head} * append.exchange.n_rows + row.token) * bytes;
    to.window[i] = row.is_resident ? append.pages.planes[p] + row.page + row.head * append.pages.head_stride[p] +
                                         row.slot_in_page * in_window
                                   : nullptr;
  }
  return to;
}

// Rounds and writes a row of K or V. room: as in store_query(), for rows of K.
template <Rotates kRotates, WritesTo kTo>
__device__ inline void store_key_or_value(const AppendCall& call, const NewRow& row, std::byte* slot, float* room) {
  const int lane = static_cast<int>(threadIdx.x % 32), dim = dim_of(call, row);
  const int type = row.plane == kPlaneK ? call.k_type : call.v_type;
  const int bytes = row.plane == kPlaneK ? call.k_four_bytes : call.v_four_bytes;
  const bool has_scales = call.row_bytes[row.plane + 1] > 0;
  const Destination to = find_destination(call, row, slot);
  float x[kFours][kLaneNumbers], kept[kFours][kLaneNumbers];
#pragma unroll
  for (int j = 0; j < kFours; ++j) widen_four(source_of(call, row).dtype, row.fours[j], x[j]);
  if constexpr (kRotates == Rotates::kHadamard)
    if (row.plane == kPlaneK) hadamard_row(dim, call.hadamard_factor, x);
#pragma unroll
  for (int j = 0; j < kFours; ++j) {
    const StoredFour stored = round_numbers(type, x[j]);
    if (room != nullptr) widen_stored(type, stored, kept[j]);
    const int four = first_of_four(j) / kLaneNumbers;
    if (first_of_four(j) >= dim) continue;
    const bool leads = has_scales && lane % 8 == 0;
    if (kTo != WritesTo::kWindow) store_codes(to.host[0] + four * bytes, stored.codes, bytes);
    if (kTo != WritesTo::kWindow && leads) store_codes(to.host[1] + four / 8 * 2, make_uint4(stored.scale, 0, 0, 0), 2);
    if (kTo == WritesTo::kSlot || to.window[0] == nullptr || room != nullptr) continue;
    store_codes(to.window[0] + four * bytes, stored.codes, bytes);
    if (leads) store_codes(to.window[1] + four / 8 * 2, make_uint4(stored.scale, 0, 0, 0), 2);
  }
  if (room == nullptr || to.window[0] == nullptr) return;
  rotate_row(call.rotation, position_of(call, call.append.sequences.sequences[row.sequence_idx], row.token), kept, room);
  store_floats(reinterpret_cast<float*>(to.window[0]), kept, dim);
}

__device__ inline void store_hidden(const AppendCall& call, const NewRow& row, std::byte* slot) {
  std::byte* const to = slot + call.append.exchange.x_at + row.token * call.x_bytes;
  const int dim = dim_of(call, row), first_four = row.head * kWarpRow / kLaneNumbers;
#pragma unroll
  for (int j = 0; j < kFours; ++j) {
    float x[kLaneNumbers];
    widen_four(call.append.x.dtype, row.fours[j], x);
    const StoredFour stored = call.x_type == TANDEM_Q4_64 ? quantise_to_minimum(x) : round_numbers(call.x_type, x);
    if (first_of_four(j) >= dim) continue;
    const int four = first_four + first_of_four(j) / kLaneNumbers;
    store_codes(to + four * call.x_four_bytes, stored.codes, call.x_four_bytes);
    if (call.x_group_fours > 0 && four % call.x_group_fours == 0)
      store_codes(to + call.x_scales_at + four / call.x_group_fours * call.x_scale_bytes, make_uint4(stored.scale, 0, 0, 0),
                  call.x_scale_bytes);
  }
}

__device__ inline void store_header(const AppendCall& call, Word ticket, std::byte* slot) {
  static_assert(sizeof(SlotHeader) == 2 * sizeof(uint4) && offsetof(SlotHeader, tag) == 8);
  *reinterpret_cast<uint4*>(slot) =
      make_uint4(static_cast<uint32_t>(ticket), static_cast<uint32_t>(ticket >> 32), static_cast<uint32_t>(call.append.tag),
                 static_cast<uint32_t>(call.append.sequences.n_sequences));
  const bool has_any = call.append.sequences.n_sequences > 0;
  const DeviceIndices& idx = call.append.idx;
  static_assert(offsetof(SlotHeader, n_idx) == 20 && offsetof(SlotHeader, unit_shift) == 28);
  reinterpret_cast<uint4*>(slot)[1] =
      make_uint4(has_any ? static_cast<uint32_t>(call.append.sequences.sequences[0].step) : 0,
                 static_cast<uint32_t>(idx.n_idx), static_cast<uint32_t>(idx.n_heads),
                 static_cast<uint32_t>(idx.unit_shift) | static_cast<uint32_t>(idx.plus_window) << 16);
}

// Copies named indices to the slot. warp, n_warps: of the grid.
__device__ inline void store_indices(const AppendCall& call, std::byte* slot, int warp, int n_warps) {
  const DeviceIndices& idx = call.append.idx;
  for (int list = warp; list < call.append.n_tokens * idx.n_heads; list += n_warps) {
    const int token = list / idx.n_heads, head = list - token * idx.n_heads;
    if (find_sequence(call.append.sequences, token) < 0) continue;  // in replays with fewer tokens
    const int32_t* const from = idx.data + token * idx.token_stride + head * idx.head_stride;
    auto* const to = reinterpret_cast<int32_t*>(slot + call.append.exchange.idx_at) + int64_t{list} * idx.n_idx;
    for (int i = static_cast<int>(threadIdx.x % 32); i < idx.n_idx; i += 32) to[i] = from[i];
  }
}

// Writes a row of any kind. room: shared memory of the warp, where positions rotate; else null.
template <Rotates kRotates, WritesTo kTo>
__device__ inline void store_row(const AppendCall& call, const NewRow& row, std::byte* slot, float* room) {
  if (row.sequence_idx < 0) return;
  if (kTo != WritesTo::kWindow && row.is_query)
    store_query<kRotates>(call, row, slot, room);
  else if (kTo != WritesTo::kWindow && row.is_hidden)
    store_hidden(call, row, slot);
  else if (kTo != WritesTo::kWindow || row.is_resident)
    store_key_or_value<kRotates, kTo>(call, row, slot, row.plane == kPlaneK ? room : nullptr);
}

// A warp's rows of a line: the first is at `at`, the others follow `step` apart.
struct WarpRows {
  RowLine line;
  int at, step;
};

// Stores a warp's rows. The first row is loaded already. kAhead: the next row is loaded while one is written, which takes
// twice the registers.
template <Rotates kRotates, WritesTo kTo, bool kAhead>
__device__ inline void store_rows(const AppendCall& call, const WarpRows& rows, NewRow row, std::byte* slot, float* room) {
  const int n_rows = call.append.n_tokens * rows.line.per_token;
  for (int at = rows.at; at < n_rows; at += rows.step) {
    if (!kAhead) store_row<kRotates, kTo>(call, row, slot, room);
    NewRow next = find_new_row<kRotates>(call, rows.line, at + rows.step);
    load_new_row(call, next);
    if (kAhead) store_row<kRotates, kTo>(call, row, slot, room);
    row = next;
  }
}

// kWindowFirst: for an append with an epoch, whose rows are not rotated.
template <Rotates kRotates, bool kWindowFirst>
__global__ void __launch_bounds__(32 * (kWindowFirst ? kAppendBesideWarps : kAppendAloneWarps))
    append_kernel(const __grid_constant__ AppendCall call) {
  constexpr bool kHasRooms = kRotates == Rotates::kByPosition;
  __shared__ float rows[kHasRooms ? kAppendAloneWarps : 1][kHasRooms ? kFours * kWarpNumbers : 1];
  __shared__ Word ticket;
  __shared__ bool is_free;
  let_next_start();
  const DeviceExchange& exchange = call.append.exchange;
  const int n_warps = static_cast<int>(blockDim.x / 32), step = static_cast<int>(gridDim.x) * n_warps;
  const int warp = static_cast<int>(blockIdx.x) * n_warps + static_cast<int>(threadIdx.x / 32);
  const WarpRows keys = {kWindowFirst ? RowLine::of_keys(call) : RowLine::of_all<kRotates>(call), warp, step};
  const WarpRows others = {kWindowFirst ? RowLine::of_others<kRotates>(call) : RowLine{}, warp, step};
  NewRow row = find_new_row<kRotates>(call, keys.line, warp);
  wait_for_before();
  const bool takes_ticket = exchange.flags != nullptr;
  Standing standing = {};
  if (takes_ticket && threadIdx.x == 0) standing = load_standing(exchange);
  load_new_row(call, row);
  NewRow other;
  if constexpr (kWindowFirst) {
    store_rows<kRotates, WritesTo::kWindow, true>(call, keys, row, nullptr, nullptr);
    say_rows_written(exchange, call.append.epoch);
    other = find_new_row<kRotates>(call, others.line, warp);
    load_new_row(call, other);
  }
  if (threadIdx.x == 0) {
    ticket = standing.next_ticket;
    is_free = !takes_ticket || wait_for_slot(exchange, standing);
  }
  __syncthreads();
  if (!is_free) return;
  std::byte* const slot = takes_ticket ? slot_of(exchange, ticket) : exchange.slots;
  if (takes_ticket && blockIdx.x == 0 && threadIdx.x == 0) store_header(call, ticket, slot);
  if (call.append.idx.n_heads > 0) store_indices(call, slot, warp, step);
  float* const room = kHasRooms ? rows[threadIdx.x / 32] : nullptr;
  constexpr WritesTo kTo = kWindowFirst ? WritesTo::kSlot : WritesTo::kBoth;
  store_rows<kRotates, kTo, kWindowFirst>(call, keys, row, slot, room);
  if constexpr (kWindowFirst) store_rows<kRotates, kTo, true>(call, others, other, slot, room);
  if (takes_ticket) hand_over(exchange, ticket, call.append.epoch);
}

}  // namespace tandem::cuda
