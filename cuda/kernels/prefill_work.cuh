// SPDX-License-Identifier: MIT
// How the blocks of a prefill kernel share its work, and which keys the rows of a block see.
//
// An item is a tile of query rows of one (sequence, KV head): kRows of its q_len * group_size rows, in the order of tokens.
// The grid has room for the items of the longest sequence that the call was declared for; what is there follows from
// lengths in device memory. A sequence's last tile, which sees most keys, comes first, and neighbours in the grid have a KV
// head in common: they read the same keys at about the same time, from the cache of the second level.
//
// With tiles (DeviceTileLists) an item's keys are those of its list, one tile after another, and the token of a key is what
// its tile says. Which rows see a tile is known by their class.
//
// Where items are fewer than the blocks that run at once, an item's keys are split evenly among n_splits blocks. Each leaves
// a state, and the block that comes last merges them, in the order of the keys.
#pragma once

#include "cuda/kernels/query_rows.cuh"
#include "cuda/prefill_call.h"

namespace tandem::cuda {

// The kernel of a shape for calls with tiles. Shape::has_tiles(): whether a call has tiles, which most shapes leave to this.
template <class Shape>
struct WithTiles : Shape {
  __device__ static constexpr bool has_tiles(const PrefillCall&) { return true; }
};

struct PrefillItem {
  Piece piece;
  int64_t first_key = 0;             // of tile 0: a multiple of the tile; 0 with a list of tiles
  int lo = 0, hi = 0;                // what any of the rows sees, from first_key on
  int common_lo = 0, common_hi = 0;  // what all of them see
  int first_tile = 0, end_tile = 0;  // of keys
  int end_place = 0;                 // behind the last key, as the item counts them: hi, or what its list has
  const KeyTile* list = nullptr;
};

__device__ inline const DeviceTiles& tiles_of(const PrefillCall& call, int sequence, const Piece& piece) {
  const DeviceTileLists& tiles = call.tiles;
  return tiles.lists[sequence * tiles.per_sequence + (tiles.n_heads == 1 ? 0 : piece.head * tiles.per_head) +
                     piece.first_row / kTileRows];
}

template <class Shape>
__device__ inline PrefillItem find_item(const PrefillCall& call) {
  static_assert(kTileRows % Shape::kRows == 0);
  PrefillItem item;
  Piece& piece = item.piece;
  const int block = static_cast<int>(blockIdx.x), split = block % call.n_splits;
  piece.item = block / call.n_splits;
  const int from_last = piece.item % call.max_tiles, list = piece.item / call.max_tiles;
  piece.sequence = call.sequences[list / call.n_kv_heads];
  piece.head = list % call.n_kv_heads;
  piece.sliding_window = call.sliding_window;
  if (call.lists.keys != nullptr) {
    const DeviceKeys& keys = keys_of_head(call.lists, list / call.n_kv_heads, piece.head);
    piece.sequence.begin = keys.begin;
    if (keys.sliding_window > 0) piece.sliding_window = keys.sliding_window;
  }
  const int n_rows = piece.sequence.q_len * call.group_size;
  piece.first_row = ((n_rows + Shape::kRows - 1) / Shape::kRows - 1 - from_last) * Shape::kRows;
  if (piece.first_row < 0) return item;
  piece.n_rows = min(n_rows - piece.first_row, Shape::kRows);

  const int64_t begin = piece.sequence.begin, end = piece.sequence.end;
  const int64_t first_hi = end + piece.sequence.n_after - piece.sequence.q_len + 1 + piece.first_row / call.group_size;
  const int64_t last_hi =
      first_hi - piece.first_row / call.group_size + (piece.first_row + piece.n_rows - 1) / call.group_size;
  const int64_t lo = piece.sliding_window > 0 ? max(begin, first_hi - piece.sliding_window) : begin;
  const int64_t most_lo = piece.sliding_window > 0 ? max(begin, last_hi - piece.sliding_window) : begin;
  const int64_t hi = min(end, last_hi), least_hi = min(end, first_hi);
  if (hi <= lo) return item;
  item.first_key = Shape::has_tiles(call) ? 0 : lo / Shape::kTileKeys * Shape::kTileKeys;
  item.lo = static_cast<int>(lo - item.first_key);
  item.hi = static_cast<int>(hi - item.first_key);
  item.common_lo = static_cast<int>(min(most_lo, end) - item.first_key);
  item.common_hi = static_cast<int>(max(least_hi - item.first_key, int64_t{0}));
  item.end_place = item.hi;
  if (Shape::has_tiles(call)) {
    const DeviceTiles& tiles = tiles_of(call, list / call.n_kv_heads, piece);
    item.list = call.tiles.keys + tiles.first;
    item.end_place = tiles.n * kTileTokens;
  }
  const int n_tiles = (item.end_place + Shape::kTileKeys - 1) / Shape::kTileKeys;
  item.first_tile = Share::begin(n_tiles, call.n_splits, split);
  item.end_tile = Share::begin(n_tiles, call.n_splits, split + 1);
  return item;
}

// The keys that a row sees, from the item's first key on: [lo, hi).
struct RowKeys {
  int lo, hi;
};
__device__ inline RowKeys keys_of_row(const PrefillCall& call, const PrefillItem& item, int r) {
  const DeviceSequence& sequence = item.piece.sequence;
  const int64_t hi = sequence.end + sequence.n_after - sequence.q_len + 1 + (item.piece.first_row + r) / call.group_size;
  const int64_t sliding_window = item.piece.sliding_window;
  const int64_t lo = sliding_window > 0 ? max(sequence.begin, hi - sliding_window) : sequence.begin;
  return {static_cast<int>(min(lo, sequence.end) - item.first_key),
          static_cast<int>(min(hi, sequence.end) - item.first_key)};
}

// Where the keys of a unit are: bytes from the page called 0, the first slot there, and the first key, counted from the
// item's first_key.
struct TilePlace {
  int64_t page;
  int slot;
  int key;
};

template <class Shape, int kKeys>
__device__ inline TilePlace place_of(const PrefillCall& call, const PrefillItem& item, int tile) {
  static_assert(kTileTokens % kKeys == 0);
  if (Shape::has_tiles(call)) {
    const int at = tile * kKeys;
    const KeyTile& named = item.list[at / kTileTokens * call.tile_words];
    const int key = named.token + at % kTileTokens;
    return {named.page, static_cast<int>(static_cast<uint32_t>(key) % static_cast<uint32_t>(call.page_len)), key};
  }
  const auto unit = static_cast<uint32_t>(item.first_key / kKeys) + static_cast<uint32_t>(tile);
  const uint32_t page_units = static_cast<uint32_t>(call.page_len) / kKeys, page_idx = unit / page_units;
  const uint32_t entry = page_idx % static_cast<uint32_t>(item.piece.sequence.table_len);
  return {call.page_tables[item.piece.sequence.table_begin + entry],
          static_cast<int>((unit - page_idx * page_units) * kKeys), tile * kKeys};
}

// Of an item with tiles.
__device__ inline int class_of_row(const PrefillCall& call, const PrefillItem& item, int r) {
  const int row = item.piece.first_row + r, first_of_list = item.piece.first_row / kTileRows * kTileRows;
  return call.tiles.classes_by == kByHead ? row % call.group_size : row / call.group_size - first_of_list / call.group_size;
}

// What the list says of a unit, to rows of one class. It is loaded long before it is used.
struct NamedUnit {
  int token;  // the first
  uint32_t classes;

  __device__ bool has(int row_class) const { return (classes >> row_class % 32 & 1) != 0; }
};
template <int kKeys>
__device__ inline NamedUnit find_named(const PrefillCall& call, const PrefillItem& item, int unit, int row_class) {
  const int at = unit * kKeys;
  if (at >= item.end_place) return {0, 0};
  const KeyTile* tile = item.list + at / kTileTokens * call.tile_words + row_class / 32;
  const int2 head = __ldg(reinterpret_cast<const int2*>(tile));  // token and classes
  return {head.x + at % kTileTokens, static_cast<uint32_t>(head.y)};
}

// What takes a row's products to logits: in units of ln 2 where there is no soft cap, else in units of the cap.
__device__ inline float logit_scale(const PrefillCall& call) {
  return call.sm_scale * (call.soft_cap > 0.0f ? 1.0f / call.soft_cap : kLog2E);
}

// The row of states that are as long as the call is.
__device__ inline int64_t state_row(const PrefillCall& call, const Piece& piece, int r) {
  return row_offset(call, piece, r, call.n_kv_heads * call.group_size, 1);
}

}  // namespace tandem::cuda
