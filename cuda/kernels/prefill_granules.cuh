// SPDX-License-Identifier: MIT
// Granules of key lists (lib/tables/key_list.h) in the prefill kernel for compute capability 9.0 (prefill_sm90.cuh).
//
// The first tiles of an item's keys are the granules of its list, kTileKeys / 8 a tile. The tiles of its range follow. The
// last tile of granules is filled up with empty granules. Eight rows are an atom of the swizzle, so the copy engine can
// bring a granule to any eighth row of a tile.
//
//   warp w of the four that bring     brings granules 4 w .. 4 w + 3 of each tile (two of shorter tiles), one a lane
//   lane i of a warp that multiplies  knows granule i of the tile, and loads it before the tile arrives
//
// Rows that no query sees may hold NaN. In K they do no harm, as their logits become -inf. In V they would, as 0 x NaN is
// NaN. So the engine brings only those granules of V whose rows are all seen. The warp copies the others, with zeros for
// the rows that no query sees. Its threads count at the tile's barrier when their copies have arrived, and the warps that
// multiply fence the tile.
#pragma once

#include "cuda/kernels/bulk_copy.cuh"
#include "cuda/kernels/prefill_work.cuh"
#include "cuda/kernels/wgmma.cuh"

namespace tandem::cuda {

template <class Shape>
struct GranuleTile {
  static constexpr int kGranules = Shape::kTileKeys / kGranuleKeys;
  static constexpr int kOfWarp = kGranules / 4;  // granules that a warp brings
  static constexpr int kKnown = 32 / kOfWarp;    // tiles whose granules a warp knows
};
inline constexpr int kGranuleBytes = kGranuleKeys * 128;  // in a block of 64 dims

__device__ inline KeyGranule granule_at(const Piece& piece, int at) {
  return at < piece.n_granules ? piece.granules[at] : KeyGranule{};
}

// ---- keys --------------------------------------------------------------------------------------------------------------

// The granule that a lane of a bringing warp knows. Lanes are ordered by tile, from tile `base` on. No granule is known at
// first.
struct GranuleWalk {
  int base = -32;
  uint32_t seen = 0;  // bit i: some query of the item sees token i of the granule
  int64_t at = 0;     // bytes from the KV head's first row in the page called 0, the same in K and V
};

template <class Shape>
__device__ inline void look_up_granules(const PrefillCall& call, const PrefillItem& item, int tile, GranuleWalk& walk) {
  using Tile = GranuleTile<Shape>;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x % 128 / 32);
  const int of_tile = warp * Tile::kOfWarp + lane % Tile::kOfWarp;
  const KeyGranule granule = granule_at(item.piece, (tile + lane / Tile::kOfWarp) * Tile::kGranules + of_tile);
  walk.base = tile;
  walk.seen = granule.keys & granule_bits(granule.token, item.seen_begin, item.seen_end);
  const uint32_t slot = static_cast<uint32_t>(granule.token) % static_cast<uint32_t>(call.page_len);
  walk.at = granule.page + slot * (2 * Shape::kDim);
}

// Called by a warp. Rows that are not seen become zeros.
template <class Shape>
__device__ inline void copy_granule(const std::byte* rows, uint32_t seen, uint32_t to) {
  constexpr int kRowBytes = 2 * Shape::kDim;
  const int row = static_cast<int>(threadIdx.x) % 32 / 8, piece = static_cast<int>(threadIdx.x) % 8;
#pragma unroll
  for (int block = 0; block < Shape::kBlocksOf64; ++block) {
    if (8 * block + piece >= kRowBytes / 16) continue;
#pragma unroll
    for (int r = 0; r < kGranuleKeys; r += 4)
      copy_async<16>(to + swizzled(row + r, piece) + block * (Shape::kTileKeys * 128),
                     rows + (row + r) * kRowBytes + 16 * piece + block * 128, (seen >> (row + r) & 1) != 0);
  }
}

// ---- logits ------------------------------------------------------------------------------------------------------------

// Returns granule i % kGranules of the tile in lane i.
template <class Shape>
__device__ inline KeyGranule find_granule(const PrefillItem& item, int tile) {
  constexpr int kGranules = GranuleTile<Shape>::kGranules;
  return granule_at(item.piece, tile * kGranules + static_cast<int>(threadIdx.x) % kGranules);
}

// Returns the tokens [lo, hi) that causality and the sliding window let a row see.
__device__ inline RowKeys tokens_of_row(const PrefillCall& call, const PrefillItem& item, int r) {
  const DeviceSequence& sequence = item.piece.sequence;
  const int64_t hi = sequence.end + sequence.n_after - sequence.q_len + 1 + (item.piece.first_row + r) / call.group_size;
  const int64_t sliding_window = item.piece.sliding_window;
  return {static_cast<int>(sliding_window > 0 ? max(hi - sliding_window, int64_t{0}) : 0), static_cast<int>(hi)};
}

// Masks the keys of a tile of granules that rows `row` and `row` + 8 do not see. A thread has two neighbouring keys of each
// granule.
template <class Shape>
__device__ inline void mask_granules(const PrefillCall& call, const PrefillItem& item, const KeyGranule& own, int row,
                                     float (&s)[Shape::kTileKeys / 2]) {
  constexpr int kGranules = GranuleTile<Shape>::kGranules;
  const bool is_common = own.token >= item.common_begin && own.token + kGranuleKeys <= item.common_end;
  if (__all_sync(~0u, own.keys == 0xffu && is_common)) return;
  const int shift = static_cast<int>(threadIdx.x) % 4 * 2;
  if (__all_sync(~0u, own.keys == 0 || is_common)) {
    uint32_t four = own.keys << threadIdx.x % 4 * kGranuleKeys;  // of four neighbouring granules
    four |= __shfl_xor_sync(~0u, four, 1);
    four |= __shfl_xor_sync(~0u, four, 2);
#pragma unroll
    for (int n = 0; n < kGranules; n += 4) {
      const uint32_t named = __shfl_sync(~0u, four, n) >> shift;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if ((named >> (i / 4 * kGranuleKeys + i % 2) & 1) == 0) s[4 * n + i] = -INFINITY;
    }
    return;
  }
  const RowKeys tokens[2] = {tokens_of_row(call, item, row), tokens_of_row(call, item, row + 8)};
#pragma unroll
  for (int n = 0; n < kGranules; ++n) {
    const int first = __shfl_sync(~0u, own.token, n) + shift;
    const uint32_t named = __shfl_sync(~0u, own.keys, n) >> shift;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first + i % 2;
      const bool is_seen = token >= tokens[i / 2].lo && token < tokens[i / 2].hi;
      if (!is_seen || (named >> i % 2 & 1) == 0) s[4 * n + i] = -INFINITY;
    }
  }
}

}  // namespace tandem::cuda
