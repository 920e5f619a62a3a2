// SPDX-License-Identifier: MIT
// How the blocks of a prefill kernel share its work, and which keys the rows of a block see.
//
// An item is a tile of query rows of one (sequence, KV head): kRows of its q_len * group_size rows, in the order of tokens.
// The grid has room for the items of the longest sequence that the call declares. Lengths in device memory say which items
// exist. A sequence's last tile sees most keys and comes first. Neighbours in the grid share a KV head: they read the same
// keys at about the same time, from the L2 cache.
//
// With granules (DeviceLists) an item's keys are those of its list: tiles of granules, then tiles of its range.
//
// With tiles (DeviceTileLists) an item's keys are those of its list, one tile after another. The tile says which tokens its
// keys are. The class of a row says whether the row sees a tile.
//
// Where items are fewer than the blocks that run at once, an item's keys are split evenly among n_splits blocks. Each
// leaves a state, and the block that comes last merges them, in the order of the keys.
//
// Kernels for 9.0 share out sequences of different lengths by length. All keys are divided into n_shares equal shares, and
// an item gets a cluster of blocks for each share that its keys fill, one at least. The items with one cluster come first in
// the grid. Most of them are short, and their multiprocessors are soon free for the others, as a grid may have more blocks
// than run at once.
//
// With either split, an item with few keys uses only the first of its clusters (keep_needed_clusters()).
#pragma once

#include "cuda/kernels/cluster.cuh"
#include "cuda/kernels/query_rows.cuh"
#include "cuda/prefill_call.h"

namespace tandem::cuda {

// The kernel of a shape for calls with tiles. Shape::has_tiles() returns whether a call has tiles. Most shapes have tiles
// only in this form.
template <class Shape>
struct WithTiles : Shape {
  __device__ static constexpr bool has_tiles(const PrefillCall&) { return true; }
};

// The kernel of a shape for calls with granules.
template <class Shape>
struct WithGranules : Shape {
  static constexpr bool kHasGranules = true;
};

struct PrefillItem {
  Piece piece;
  int64_t first_key = 0;             // first key of tile 0: a multiple of the tile; 0 with a list of tiles
  int lo = 0, hi = 0;                // the keys that any of the rows sees, from first_key on
  int common_lo = 0, common_hi = 0;  // the keys that all rows see
  int first_tile = 0, end_tile = 0;  // tiles of keys
  int end_place = 0;                 // behind the item's last key, from first_key on: hi, or the end of the list of tiles
  int list_tiles = 0;                // the first tiles of keys, which are granules; first_key is that of the next tile
  int n_parts = 0;                   // blocks that share the item's keys
  int part = 0;                      // index of this block among them
  int slot = 0;                      // of the workspace, for the state of the item's first cluster
  const KeyTile* list = nullptr;
  // For granules: the tokens that causality and the sliding window let any row see (seen_...), and let all rows see
  // (common_...).
  int seen_begin = 0, seen_end = 0, common_begin = 0, common_end = 0;
};

// Sets the item's granules. first_hi, last_hi: behind the own tokens of the item's first and last query.
template <class Shape>
__device__ inline void take_granules(const PrefillCall& call, const DeviceKeys& keys, int64_t first_hi, int64_t last_hi,
                                     PrefillItem& item) {
  constexpr int kOfTile = Shape::kTileKeys / kGranuleKeys;
  item.piece.granules = call.lists.granules + keys.first;
  item.piece.n_granules = keys.n;
  item.list_tiles = max(keys.n + kOfTile - 1, 0) / kOfTile;
  const int64_t sliding_window = item.piece.sliding_window;
  const auto begin = [&](int64_t hi) {
    return static_cast<int>(sliding_window > 0 ? max(hi - sliding_window, int64_t{0}) : 0);
  };
  item.seen_begin = begin(first_hi), item.seen_end = static_cast<int>(last_hi);
  item.common_begin = begin(last_hi), item.common_end = static_cast<int>(first_hi);
}

__device__ inline const DeviceTiles& tiles_of(const PrefillCall& call, int sequence, const Piece& piece) {
  const DeviceTileLists& tiles = call.tiles;
  return tiles.lists[sequence * tiles.per_sequence + (tiles.n_heads == 1 ? 0 : piece.head * tiles.per_head) +
                     piece.first_row / kTileRows];
}

// A block's part of an item. Items are counted as [n_sequences][n_kv_heads][max_tiles]; -1: the block has no item.
struct ItemPart {
  int item, n_parts, part, slot;
};

// The size and the number of a sequence's items.
struct SequenceShare {
  int key_tiles = 0, row_tiles = 0, n_items = 0;

  template <class Shape>
  __device__ static SequenceShare of(const PrefillCall& call, int s) {
    SequenceShare share;
    if (s >= call.n_sequences) return share;
    const DeviceSequence& sequence = call.sequences[s];
    int n_keys = static_cast<int>(sequence.end - sequence.begin);
    if (call.sliding_window > 0) n_keys = static_cast<int>(min(int64_t{n_keys}, call.sliding_window + sequence.q_len));
    share.key_tiles = (max(n_keys, 0) + Shape::kTileKeys - 1) / Shape::kTileKeys;
    share.row_tiles = (sequence.q_len * call.group_size + Shape::kRows - 1) / Shape::kRows;
    share.n_items = share.row_tiles * call.n_kv_heads;
    return share;
  }
  // Returns the clusters of an item. Shares are rounded up from a quarter on. Shares of blocks without clusters are rounded
  // down, as the workspace has room for n_shares states then. 0.001 is for the error of the division.
  __device__ int of_item(float shares_of_tile, int n_blocks) const {
    const float share = static_cast<float>(key_tiles) * shares_of_tile + (n_blocks > 1 ? 0.75f : 0.001f);
    return max(1, min(static_cast<int>(share), (key_tiles + n_blocks - 1) / n_blocks));
  }
};

// Returns the item part of this block. Lanes look at 32 sequences at a time, in three passes. The first pass counts tiles,
// the second counts items with one cluster, and the third finds this cluster's item.
template <class Shape>
__device__ inline ItemPart share_by_length(const PrefillCall& call) {
  const Cluster cluster = this_cluster();
  const int lane = static_cast<int>(threadIdx.x % 32), own = static_cast<int>(blockIdx.x) / cluster.n_blocks;
  int n_tiles = 0, n_single = 0, before = 0;  // before: clusters of earlier sequences
  float shares_of_tile = 0.0f;
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
    if (pass == 1) shares_of_tile = __fdividef(static_cast<float>(call.n_shares), static_cast<float>(max(n_tiles, 1)));
    if (pass == 2 && own >= n_single) before = n_single;
#pragma unroll 1
    for (int s = 0; s < call.n_sequences; s += 32) {
      const SequenceShare share = SequenceShare::of<Shape>(call, s + lane);
      const int of_item = share.of_item(shares_of_tile, cluster.n_blocks);
      if (pass == 0) n_tiles += sum_of_lanes(share.key_tiles * share.n_items);
      if (pass == 1) n_single += sum_of_lanes(of_item == 1 ? share.n_items : 0);
      if (pass < 2) continue;
      const bool is_single = own < n_single;
      const int each = (of_item == 1) == is_single ? of_item : 0;
      int end = each * share.n_items;
      for (int step = 1; step < 32; step *= 2) {
        const int left = __shfl_up_sync(~0u, end, step);
        if (lane >= step) end += left;
      }
      const unsigned behind = __ballot_sync(~0u, own < before + end);
      if (behind == 0) {
        before += __shfl_sync(~0u, end, 31);
        continue;
      }
      const int found = __ffs(static_cast<int>(behind)) - 1, per_item = __shfl_sync(~0u, each, found);
      const int begin = before + __shfl_sync(~0u, end - each * share.n_items, found), idx = divide(own - begin, per_item);
      const int row_tiles = __shfl_sync(~0u, share.row_tiles, found), head = divide(idx, row_tiles);
      const int list = (s + found) * call.n_kv_heads + head, first_of_item = begin + idx * per_item;
      return {list * call.max_tiles + idx - head * row_tiles, per_item * cluster.n_blocks,
              (own - first_of_item) * cluster.n_blocks + cluster.rank, is_single ? 0 : first_of_item - n_single};
    }
  }
  return {-1, 1, 0, 0};
}

template <class Shape>
__device__ inline ItemPart part_of_block(const PrefillCall& call) {
  if (Shape::kSharesByLength && call.n_shares > 0) return share_by_length<Shape>(call);
  const int block = static_cast<int>(blockIdx.x), item = block / call.n_splits;
  return {item, call.n_splits, block % call.n_splits, item * (call.n_splits / this_cluster().n_blocks)};
}

// The tiles of keys that a block of 128 rows, and of 64, attends in the time that an item's clusters take to merge through
// memory. Measured on an H100 in bf16, where the merge takes about 5 us. If these are too small, clusters merge where one
// would end sooner alone. If they are too large, one works alone where several would end sooner.
inline constexpr float kTilesOfMerge128 = 4.0f, kTilesOfMerge64 = 2.6f;

// Leaves an item of n_tiles to its first cluster if merging would take longer: if each block of that cluster gets at most
// kTilesOfMerge tiles more than with the item's other clusters. Blocks of the other clusters have no rows then, and the
// first cluster finishes the item as if it were the only one. All blocks of an item use the same numbers, so they agree.
template <class Shape>
__device__ inline void keep_needed_clusters(PrefillItem& item, int n_tiles) {
  if constexpr (Shape::kTilesOfMerge > 0.0f) {
    // n_tiles / n_blocks - n_tiles / n_parts <= kTilesOfMerge, without divisions
    const int n_blocks = this_cluster().n_blocks;
    const float more = static_cast<float>(n_tiles) * static_cast<float>(item.n_parts - n_blocks);
    if (more > Shape::kTilesOfMerge * static_cast<float>(n_blocks * item.n_parts)) return;
    if (item.part >= n_blocks) item.piece.n_rows = 0;
    item.n_parts = n_blocks;
  }
}

template <class Shape>
__device__ inline PrefillItem find_item(const PrefillCall& call) {
  static_assert(kTileRows % Shape::kRows == 0);
  PrefillItem item;
  Piece& piece = item.piece;
  const ItemPart of_block = part_of_block<Shape>(call);
  if (of_block.item < 0) return item;
  piece.item = of_block.item;
  item.n_parts = of_block.n_parts, item.part = of_block.part, item.slot = of_block.slot;
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
  if constexpr (Shape::kHasGranules)
    take_granules<Shape>(call, keys_of_head(call.lists, list / call.n_kv_heads, piece.head), first_hi, last_hi, item);
  if (hi <= lo && item.list_tiles == 0) return item;
  item.first_key = Shape::has_tiles(call) ? 0 : lo / Shape::kTileKeys * Shape::kTileKeys;
  item.lo = static_cast<int>(lo - item.first_key);
  item.hi = static_cast<int>(hi - item.first_key);
  item.common_lo = static_cast<int>(min(most_lo, end) - item.first_key);
  item.common_hi = static_cast<int>(max(least_hi - item.first_key, int64_t{0}));
  item.end_place = Shape::kHasGranules && hi <= lo ? 0 : item.hi;
  if (Shape::has_tiles(call)) {
    const DeviceTiles& tiles = tiles_of(call, list / call.n_kv_heads, piece);
    item.list = call.tiles.keys + tiles.first;
    item.end_place = tiles.n * kTileTokens;
  }
  const int n_tiles = item.list_tiles + (item.end_place + Shape::kTileKeys - 1) / Shape::kTileKeys;
  keep_needed_clusters<Shape>(item, n_tiles);
  item.first_tile = Share::begin(n_tiles, item.n_parts, item.part);
  item.end_tile = Share::begin(n_tiles, item.n_parts, item.part + 1);
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

// The place of a unit of keys. page: bytes from the page called 0. slot: the first slot in the page. key: the first key,
// from the item's first_key on.
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

// Returns the class of a row, for items with tiles.
__device__ inline int class_of_row(const PrefillCall& call, const PrefillItem& item, int r) {
  const int row = item.piece.first_row + r, first_of_list = item.piece.first_row / kTileRows * kTileRows;
  return call.tiles.classes_by == kByHead ? row % call.group_size : row / call.group_size - first_of_list / call.group_size;
}

// A list's entry of a unit, for rows of one class. The entry is loaded long before it is used.
struct NamedUnit {
  int token;  // the unit's first token
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

// Returns the factor from a row's products to logits: in units of ln 2 without a soft cap, else in units of the cap.
__device__ inline float logit_scale(const PrefillCall& call) {
  return call.sm_scale * (call.soft_cap > 0.0f ? 1.0f / call.soft_cap : kLog2E);
}

// Returns the row of row r in states that have all rows of the call.
__device__ inline int64_t state_row(const PrefillCall& call, const Piece& piece, int r) {
  return row_offset(call, piece, r, call.n_kv_heads * call.group_size, 1);
}

}  // namespace tandem::cuda
