// SPDX-License-Identifier: MIT
// How the blocks of a decode kernel share its work.
//
// A unit is kUnitKeys keys, 16 for each warp, of an item. An item is one (sequence, KV head, tile of query rows). All units
// of a call stand in one line, item by item. A block's part of the line follows from the lengths alone, which are in device
// memory. So one grid serves every length, and a captured graph stays right while lengths change. A piece is a block's part
// of an item.
//
// Where there are enough blocks, every item has blocks of its own, in proportion to its units. A block then has one piece,
// which saves the costs of a piece's start and end (kPieceUnits: the cost in units). Otherwise, or where that split gives
// some block more, each block has an equal share of the line, and ragged lengths balance. No block has fewer than
// kLeastUnits.
//
// Long items go round: their blocks in turn take one unit for each of their warps, so that all blocks read from
// neighbouring pages at any time. Where each block reads a part of its own, the fastest multiprocessors end a quarter
// sooner than the others, which then cannot use the whole memory bandwidth.
//
// Lanes look at 32 sequences at a time, as a loop over single sequences would take as long as attention over a short one.
// With key lists (Shape::kHasLists) the line has an entry for each (sequence, list) instead of each sequence. The units of
// its granules come first, then those of its range.
#pragma once

#include "cuda/decode_call.h"
#include "cuda/kernels/warp_ops.cuh"

namespace tandem::cuda {

// The kernel of a shape for calls with key lists.
template <class Shape>
struct WithLists : Shape {
  static constexpr bool kHasLists = true;
};

// An item and the block's part of its keys.
struct Piece {
  DeviceSequence sequence;
  int head = 0, first_row = 0, n_rows = 0;  // rows of the sequence's q_len * group_size
  int item = 0;
  int first_unit = 0, end_unit = 0;    // the piece's units, of the item's; none: the block has no work
  int stride = 0;                      // from one unit of a warp to its next; above kWarps: other blocks have units between
  int first_block = 0, end_block = 0;  // blocks that have pieces of the item
  int64_t key_begin = 0;               // first key of the item's range, rounded down to a unit
  // For items with key lists, and for items of prefill kernels.
  const KeyGranule* granules = nullptr;
  int n_granules = 0;  // -1: the list is wrong
  int list_units = 0;
  int64_t sliding_window = 0;
  int64_t seen_begin = 0;  // no query sees a key before this token

  __device__ bool has_keys() const { return list_units > 0 || sequence.begin < sequence.end; }
};

// Returns the entry of a call's key lists for a sequence and a KV head.
__device__ inline const DeviceKeys& keys_of_head(const DeviceLists& lists, int sequence, int head) {
  return lists.keys[sequence * lists.per_sequence + (lists.n_heads == 1 ? 0 : head)];
}

// Returns which of the kGranuleKeys tokens from `token` on are in [begin, end): bit i is token + i.
__device__ inline uint32_t granule_bits(int64_t token, int64_t begin, int64_t end) {
  const int lo = static_cast<int>(min(max(begin - token, int64_t{0}), int64_t{kGranuleKeys}));
  const int hi = static_cast<int>(max(min(end - token, int64_t{kGranuleKeys}), int64_t{0}));
  return hi > lo ? (1u << hi) - (1u << lo) : 0u;
}

// The units of a sequence, or of one of its lists.
struct Extent {
  int64_t begin = 0;  // first key of the range that a query sees
  int64_t key_begin = 0;
  int units = 0;  // of an item; at least 1, as some block has to write the empty state
  int n_tiles = 0;
  int n_items = 0;         // 0 behind the last sequence
  int list_units = 0;      // units of granules, which are the first of `units`
  int64_t seen_begin = 0;  // no query sees a key before this token
};

// Returns the number of entries in the line: sequences, or their lists.
template <class Shape>
__device__ inline int n_entries(const DecodeCall& call) {
  return Shape::kHasLists ? call.n_sequences * call.lists.n_heads : call.n_sequences;
}

template <class Shape>
__device__ inline Extent extent_of(const DecodeCall& call, int entry) {
  Extent extent;
  if (entry >= n_entries<Shape>(call)) return extent;
  const int s = Shape::kHasLists ? divide(entry, call.lists.n_heads) : entry;
  const DeviceSequence& sequence = call.sequences[s];
  int64_t first = sequence.begin, sliding_window = call.sliding_window;
  if constexpr (Shape::kHasLists) {
    const DeviceKeys& keys = keys_of_head(call.lists, s, entry - s * call.lists.n_heads);
    first = keys.begin;
    if (keys.sliding_window > 0) sliding_window = keys.sliding_window;
    if (call.lists.has_granules != 0)
      extent.list_units = (max(keys.n, 0) * kGranuleKeys + Shape::kUnitKeys - 1) / Shape::kUnitKeys;
  }
  const int64_t within = sequence.end + sequence.n_after - sequence.q_len + 1 - sliding_window;
  const int64_t begin = sliding_window > 0 && within > first ? min(within, sequence.end) : first;
  if (sliding_window > 0) extent.seen_begin = max(within, int64_t{0});
  extent.begin = begin;
  extent.key_begin = begin / Shape::kUnitKeys * Shape::kUnitKeys;
  extent.units = static_cast<int>((sequence.end - extent.key_begin + Shape::kUnitKeys - 1) / Shape::kUnitKeys);
  if (Shape::kHasLists) extent.units = extent.list_units + (begin < sequence.end ? extent.units : 0);
  extent.units = max(1, extent.units);
  extent.n_tiles = (sequence.q_len * call.group_size + Shape::kRows - 1) / Shape::kRows;
  extent.n_items = extent.n_tiles * (Shape::kHasLists ? divide(call.n_kv_heads, call.lists.n_heads) : call.n_kv_heads);
  return extent;
}

__device__ inline int sum_of_lanes(int x) { return static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(x))); }
__device__ inline int most_of_lanes(int x) { return __reduce_max_sync(~0u, x); }

struct Share {
  int n_units = 0, n_blocks = 0;
  bool is_by_item = false;

  template <class Shape>
  __device__ static Share make(const DecodeCall& call) {
    Share share;
    const int lane = threadIdx.x % 32;
    for (int s = 0; s < n_entries<Shape>(call); s += 32) {
      const Extent extent = extent_of<Shape>(call, s + lane);
      share.n_units += sum_of_lanes(extent.units * extent.n_items);
    }
    share.n_blocks = min(static_cast<int>(gridDim.x), max(share.n_units / Shape::kLeastUnits, 1));
    int n_used = 0, most = 0;
    for (int s = 0; s < n_entries<Shape>(call) && n_used <= static_cast<int>(gridDim.x); s += 32) {
      const Extent extent = extent_of<Shape>(call, s + lane);
      const int of_item = share.of_item(extent.units);
      n_used += sum_of_lanes(of_item * extent.n_items);
      most = max(most, most_of_lanes(divide(extent.units, of_item)));
    }
    constexpr float kMore = 1.0625f;  // memory is the limit, so one block in sixteen may be idle
    const float each = __fdividef(static_cast<float>(share.n_units), static_cast<float>(share.n_blocks));
    share.is_by_item =
        n_used <= static_cast<int>(gridDim.x) && static_cast<float>(most) <= kMore * each + Shape::kPieceUnits;
    return share;
  }
  // Returns the blocks of an item. A rough value is enough, as make() adds up the results.
  __device__ int of_item(int units) const {
    const float share = __fdividef(static_cast<float>(n_blocks), static_cast<float>(n_units));
    return max(1, static_cast<int>(static_cast<float>(units) * share + 0.001f));
  }
  // Returns where a block's part of the line begins.
  __device__ int begin_of(int block) const { return begin(n_units, n_blocks, min(block, n_blocks)); }

  // Where n blocks share `units`: the first unit of block b, and the block of a unit.
  __device__ static int begin(int units, int n, int b) {
    const int each = divide(units, n);
    return b * each + min(b, units - each * n);
  }
  __device__ static int block_of(int units, int n, int unit) {
    const int each = units / n, of_longer = units % n * (each + 1);
    return unit < of_longer ? unit / (each + 1) : units % n + (unit - of_longer) / each;
  }
};

template <class Shape>
__device__ inline void copy_list(const DecodeCall& call, const Extent& extent, int sequence, int list, Piece& piece) {
  const DeviceKeys& keys = keys_of_head(call.lists, sequence, list);
  piece.granules = call.lists.granules + keys.first;
  piece.n_granules = keys.n;
  piece.list_units = extent.list_units;
  piece.sliding_window = keys.sliding_window > 0 ? keys.sliding_window : call.sliding_window;
  piece.seen_begin = extent.seen_begin;
}

// Returns the block's piece that begins at unit `at` of the line of all units (top of this file) or, with is_by_item, its
// only piece.
template <class Shape>
__device__ inline Piece find_piece(const DecodeCall& call, const Share& share, int at) {
  Piece piece;
  const int block = static_cast<int>(blockIdx.x), lane = threadIdx.x % 32;
  const int target = share.is_by_item ? block : at;
  const int n = n_entries<Shape>(call);
  int first = 0;  // blocks or units of earlier entries
  for (int s = 0; s < n; s += 32) {
    const Extent own = extent_of<Shape>(call, s + lane);
    const int each = share.is_by_item ? share.of_item(own.units) : own.units;
    int end = each * own.n_items;
    for (int step = 1; step < min(32, n); step *= 2) {
      const int before = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += before;
    }
    const unsigned behind = __ballot_sync(~0u, target < first + end);
    if (behind == 0) {
      first += __shfl_sync(~0u, end, 31);
      continue;
    }
    const int found = __ffs(static_cast<int>(behind)) - 1, per_item = __shfl_sync(~0u, each, found);
    const int begin = first + __shfl_sync(~0u, end - each * own.n_items, found), idx = divide(target - begin, per_item);
    const Extent extent = extent_of<Shape>(call, s + found);
    const int first_of_item = begin + idx * per_item;
    const int sequence = Shape::kHasLists ? divide(s + found, call.lists.n_heads) : s + found;
    piece.sequence = call.sequences[sequence];
    piece.sequence.begin = extent.begin;  // earlier keys are not read, as they may be NaN
    piece.head = extent.n_tiles == 1 ? idx : idx / extent.n_tiles;
    piece.first_row = (idx - piece.head * extent.n_tiles) * Shape::kRows;
    piece.n_rows = min(piece.sequence.q_len * call.group_size - piece.first_row, Shape::kRows);
    if constexpr (Shape::kHasLists) {
      const int list = s + found - sequence * call.lists.n_heads;
      copy_list<Shape>(call, extent, sequence, list, piece);
      if (call.lists.n_heads > 1) piece.head = list;
      piece.item = (sequence * call.n_kv_heads + piece.head) * call.max_tiles + piece.first_row / Shape::kRows;
    } else {
      piece.item = sequence * call.n_kv_heads * call.max_tiles + idx;
    }
    piece.stride = Shape::kWarps;
    piece.key_begin = extent.key_begin;
    if (share.is_by_item) {
      const bool goes_round = Shape::kRoundUnits > 0 && extent.units >= Shape::kRoundUnits * per_item;
      const int nth = block - first_of_item;
      piece.first_unit = goes_round ? nth * Shape::kWarps : Share::begin(extent.units, per_item, nth);
      piece.end_unit = goes_round ? extent.units : Share::begin(extent.units, per_item, nth + 1);
      if (goes_round) piece.stride = per_item * Shape::kWarps;
      piece.first_block = first_of_item;
      piece.end_block = first_of_item + per_item;
    } else {
      piece.first_unit = at - first_of_item;
      piece.end_unit = min(share.begin_of(block + 1) - first_of_item, extent.units);
      piece.first_block = Share::block_of(share.n_units, share.n_blocks, first_of_item);
      piece.end_block = Share::block_of(share.n_units, share.n_blocks, first_of_item + extent.units - 1) + 1;
    }
    break;
  }
  return piece;
}

}  // namespace tandem::cuda
