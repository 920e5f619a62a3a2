// SPDX-License-Identifier: MIT
// Attention of many queries for compute capability 9.0, all in bf16 or all in f16, by products of warpgroups.
//
// A block has 128 query rows (prefill_work.cuh), 64 for each of two warpgroups. A third warpgroup brings K and V to shared
// memory, each two tiles of keys deep. A unit is 64 keys, as pages may be that short. The copy engine brings units whose
// keys are all seen by some row. The threads copy units at the edge, and write zeros for keys that no row sees. Both sides
// count in barriers: full when a tile's copies have arrived, free when the warps have read the tile.
//
//   warpgroup 0   S1 = q K1  |  softmax of S1       |  S2 = q K2, O += P1 V1  |  softmax of S2 ...
//   warpgroup 1              |  S1 = q K1           |  softmax of S1          |  S2 = q K2, O += P1 V1 ...
//
// So the tensor cores have the products of one warpgroup while the other computes weights. The warpgroups take turns in
// issuing products (kTurn), and the product of the last weights with V runs beside the softmax of the next logits.
//
// Weights are rounded to V's type. Sums of weights are not rounded.
//
// Calls with granules have kernels of their own (prefill_granules.cuh).
//
// Calls of up to 64 rows have blocks of 64 rows. Both warpgroups then multiply the same rows, each with every second tile
// of keys, and tiles are three deep. The two states are merged with those of the other blocks (prefill_finish.cuh). Such
// calls wait for memory, not for products, so each weight is the sum of two numbers of V's type, as in decode.
#pragma once

#include "cuda/kernels/beside_append.cuh"
#include "cuda/kernels/prefill_finish.cuh"
#include "cuda/kernels/prefill_granules.cuh"
#include "cuda/kernels/stored.cuh"
#include "cuda/kernels/wgmma.cuh"

namespace tandem::cuda {

// Sizes of tiles of keys and of a state. kKParts: summands of K's numbers, each in a tile of its own. kRows: 128, or 64
// rows that both warpgroups multiply, each with tiles of its own.
template <int kDim_, int kTileKeys_, int kKParts_, int kStages_ = 2, int kRows_ = 128>
struct GroupsShape {
  static constexpr int kDim = kDim_, kVDim = kDim_, kTileKeys = kTileKeys_, kKParts = kKParts_;
  static constexpr int kWarps = 8, kThreads = 384, kRows = kRows_;  // kWarps: of the warpgroups that multiply
  static constexpr int kKeySplits = 128 / kRows;                    // parts of a block's keys, each for some of the warps
  static constexpr int kPParts = kRows == 64 ? 2 : 1;               // summands of a weight
  static constexpr int kStages = kStages_, kBlocksOf64 = (kDim + 63) / 64;
  static constexpr int kQBytes = kRows * 128 * kBlocksOf64, kTileBytes = kTileKeys * 128 * kBlocksOf64;
  static constexpr int kStateStride = kVDim + (40 - kVDim % 32) % 32;  // rows 8 banks apart
  static constexpr int kStateFloats = kRows * (kStateStride + 2);
  static constexpr int kUsedBytes = kQBytes + kStages * (kKParts + 1) * kTileBytes;
  static constexpr int kStatesBytes = 4 * kKeySplits * kStateFloats;
  static constexpr int kSharedBytes = 1024 + (kUsedBytes > kStatesBytes ? kUsedBytes : kStatesBytes);
  static constexpr int kBlocks = 1;
  static constexpr int kStatesAtOnce = 8;  // states of a row that a warp loads at once for a merge
  static constexpr bool kSharesByLength = true, kHasGranules = false;
  static constexpr float kTilesOfMerge = kRows == 64 ? kTilesOfMerge64 : kTilesOfMerge128;  // keep_needed_clusters()
  static constexpr bool kFencesTiles = false;  // true: the warps that multiply fence arrived tiles; else the warps that
                                               // bring them
  static constexpr int kSyncAll = 1, kTurn = 2, kOwn = 4;  // barriers; each warpgroup has one kTurn and one kOwn
  __device__ static constexpr bool has_tiles(const PrefillCall&) { return false; }
  __device__ static void sync() { sync_threads(kSyncAll, 32 * kWarps); }
  __device__ static bool sync_any(bool x) { return any_of_threads(kSyncAll, 32 * kWarps, x); }
  // k: address of the first tile of K. The tiles of V follow those of K.
  __device__ static uint32_t tile_at(uint32_t k, bool is_v, int stage) {
    return k + (is_v ? kStages * kKParts + stage : stage * kKParts) * kTileBytes;
  }
};

template <class Stored_, int kDim_, int kRows_ = 128>
struct Sm90Shape : GroupsShape<kDim_, kDim_ <= 128 ? 128 : 64, 1, kRows_ == 64 ? 3 : 2, kRows_> {
  using K = Stored_;
  using V = Stored_;
  using Number = typename Stored_::KeyNumber;
};

// The barriers of a block.
template <class Shape>
struct TileBarriers {
  uint32_t base;
  __device__ uint32_t full(bool is_v, int stage) const { return base + 8 * ((is_v ? Shape::kStages : 0) + stage); }
  __device__ uint32_t free(bool is_v, int stage) const { return full(is_v, stage) + 16 * Shape::kStages; }
};
inline constexpr int kBarriersOfStage = 4;

// Maps of the copy engine, for K and V: boxes of a unit and, with granules, boxes of a granule.
template <class Shape>
struct TileMaps {
  CUtensorMap unit;
};
template <class Shape>
requires(Shape::kHasGranules) struct TileMaps<Shape> {
  CUtensorMap unit, granule;
};

// One thread calls this, before any thread uses the barriers.
template <class Shape>
__device__ inline void init_barriers(TileBarriers<Shape> barriers) {
  for (int i = 0; i < 2 * Shape::kStages; ++i) {
    init_barrier(barriers.base + 8 * i, 128);
    init_barrier(barriers.free(false, 0) + 8 * i, Shape::kWarps / Shape::kKeySplits);
  }
  fence_products();
}

// ---- keys --------------------------------------------------------------------------------------------------------------

// The places of units of 64 or fewer keys. Lane i knows the i-th unit from `base` on. No unit is known at first.
struct UnitWalk {
  int base = -32;
  TilePlace place = {0, 0, 0};
};

template <class Shape, int kKeys>
__device__ inline TilePlace find_unit(const PrefillCall& call, const PrefillItem& item, int unit, UnitWalk& walk) {
  if (unit - walk.base >= 32) {
    walk.base = unit;
    const int own = unit + static_cast<int>(threadIdx.x % 32);
    const TilePlace none = {0, 0, item.hi};  // nothing is read there
    walk.place = kKeys * own < item.end_place ? place_of<Shape, kKeys>(call, item, own) : none;
  }
  const int lane = unit - walk.base;
  return {__shfl_sync(~0u, walk.place.page, lane), __shfl_sync(~0u, walk.place.slot, lane),
          Shape::has_tiles(call) ? __shfl_sync(~0u, walk.place.key, lane) : kKeys * unit};
}

// Copies a unit of 64 rows of K or V into a tile, to the address `to`. Some of the rows are outside [item.lo, item.hi), so
// that no query sees them. They may hold NaN, and become zeros. All rows have arrived when this returns. A thread copies the
// same piece of every 16th row in each block of 64 dims, so that its addresses are constants apart.
template <class Shape>
__device__ inline void bring_part_of_unit(const PrefillItem& item, const TilePlace& place, const std::byte* rows,
                                          uint32_t to) {
  constexpr int kRowBytes = 2 * Shape::kDim;
  const int thread = static_cast<int>(threadIdx.x) % 128, row = thread / 8, piece = thread % 8, key = place.key + row;
#pragma unroll
  for (int block = 0; block < Shape::kBlocksOf64; ++block) {
    if (8 * block + piece >= kRowBytes / 16) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      copy_async<16>(to + swizzled(row, piece) + block * (Shape::kTileKeys * 128) + i * 2048,
                     rows + (row + 16 * i) * kRowBytes + 16 * piece + block * 128,
                     key + 16 * i >= item.lo && key + 16 * i < item.hi);
  }
  commit_copies();
  wait_for_copies<0>();
  fence_products();
}

// The warpgroup that brings an item's tiles. k: the first tile of K in shared memory.
template <class Shape>
struct TileBringer {
  const PrefillCall& call;
  const PrefillItem& item;
  const TileMaps<Shape>* maps;
  uint32_t k;
  TileBarriers<Shape> barriers;
  uint64_t policy;
  UnitWalk walks[2] = {};
  GranuleWalk granule_walks[2] = {};

  // Brings K a tile ahead of V, as the other side reads them: the stages of K are free sooner.
  __device__ void bring_all() {
    const int n_tiles = item.end_tile - item.first_tile;
    for (int n = 0; n <= n_tiles; ++n) {
      if (n < n_tiles) bring(false, n);
      if (n > 0) bring(true, n - 1);
    }
    if (!Shape::kHasGranules) return;
    commit_copies();  // no thread ends before its copies have arrived
    wait_for_copies<0>();
  }

  // Brings the item's n-th tile. Each of the 128 threads arrives at its barrier.
  __device__ void bring(bool is_v, int n) {
    const int stage = n % Shape::kStages, plane = is_v ? kPlaneV : kPlaneK;
    const uint32_t full = barriers.full(is_v, stage), to = Shape::tile_at(k, is_v, stage);
    wait_barrier(barriers.free(is_v, stage), n / Shape::kStages % 2 ^ 1);
    const int tile = item.first_tile + n - item.list_tiles;  // tile of the range
    if constexpr (Shape::kHasGranules)
      if (tile < 0) return bring_granules(is_v, item.first_tile + n, to, full);
#pragma unroll
    for (int half = 0; half < Shape::kTileKeys / 64; ++half) {
      const int unit = tile * (Shape::kTileKeys / 64) + half;
      const TilePlace place = find_unit<Shape, 64>(call, item, unit, walks[is_v]);
      const std::byte* const rows =
          call.planes[plane] + place.page + item.piece.head * call.head_stride[plane] + place.slot * (2 * Shape::kDim);
      if (place.key < item.lo || place.key + 64 > item.hi)
        bring_part_of_unit<Shape>(item, place, rows, to + half * 64 * 128);
      else if (threadIdx.x % 128 == 0)
        ask_for_rows<64>(&maps->unit, rows, to + half * 64 * 128, full);
    }
    arrive(full);
  }

  // Brings a tile of the list. Each warp brings its own granules.
  __device__ void bring_granules(bool is_v, int tile, uint32_t to, uint32_t full) {
    using Tile = GranuleTile<Shape>;
    const int plane = is_v ? kPlaneV : kPlaneK;
    GranuleWalk& walk = granule_walks[is_v];
    if (tile - walk.base >= Tile::kKnown) look_up_granules<Shape>(call, item, tile, walk);
    const int first_lane = (tile - walk.base) * Tile::kOfWarp, nth = static_cast<int>(threadIdx.x) % 32 - first_lane;
    const bool is_own = nth >= 0 && nth < Tile::kOfWarp;
    const std::byte* const head = call.planes[plane] + item.piece.head * call.head_stride[plane];
    to += threadIdx.x % 128 / 32 * (Tile::kOfWarp * kGranuleBytes);
    if (is_own && (is_v ? walk.seen == 0xffu : walk.seen != 0))
      ask_for_rows<kGranuleKeys>(&maps->granule, head + walk.at, to + nth * kGranuleBytes, full);
    if (!is_v) return arrive(full);
    const unsigned cut = __ballot_sync(~0u, is_own && walk.seen != 0xffu);
    if (cut == 0) return arrive(full);
#pragma unroll 1
    for (unsigned left = cut; left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      copy_granule<Shape>(head + __shfl_sync(~0u, walk.at, lane), __shfl_sync(~0u, walk.seen, lane),
                          to + (lane - first_lane) * kGranuleBytes);
    }
    arrive_after_copies(full);
  }

  template <int kRows>
  __device__ void ask_for_rows(const CUtensorMap* map, const std::byte* rows, uint32_t to, uint32_t full) const {
    expect_more_bytes(full, kRows * 128 * Shape::kBlocksOf64);
#pragma unroll
    for (int block = 0; block < Shape::kBlocksOf64; ++block)
      copy_box(to + block * (Shape::kTileKeys * 128), map, 128 * block, rows, full, policy);
  }
};

// ---- queries -----------------------------------------------------------------------------------------------------------

// Brings the block's rows, as [blocks of 64 dims][kRows]. A warp brings the rows that its warpgroup multiplies or, where
// both multiply the same rows, its part of them. One lane of the warp finds the place of each row.
template <class Shape>
__device__ inline void bring_queries(const PrefillCall& call, const Piece& piece, uint32_t q) {
  constexpr int kPieces = Shape::kDim / 8, kOfWarp = Shape::kRows / Shape::kWarps;
  const int lane = static_cast<int>(threadIdx.x) % 32, first = static_cast<int>(threadIdx.x) / 32 * kOfWarp;
  const int own = first + lane;
  const int64_t own_at =
      lane < kOfWarp && own < piece.n_rows ? row_offset(call, piece, own, call.q.token_stride, call.q.head_stride) : 0;
#pragma unroll
  for (int i = 0; i < (kOfWarp * kPieces + 31) / 32; ++i) {
    const int at = 32 * i + lane, row = at / kPieces, part = at % kPieces;
    const int64_t from = __shfl_sync(~0u, own_at, row % kOfWarp) + 8 * part;
    if (row >= kOfWarp) continue;
    copy_async<16>(q + part / 8 * (Shape::kRows * 128) + swizzled(first + row, part % 8),
                   static_cast<const std::byte*>(call.q.data) + 2 * from, first + row < piece.n_rows);
  }
  commit_copies();
  wait_for_copies<0>();
  fence_products();
  if (Shape::kKeySplits > 1)
    Shape::sync();
  else
    sync_threads(Shape::kOwn + static_cast<int>(threadIdx.x) / 128, 128);
}

// ---- products and softmax ----------------------------------------------------------------------------------------------

// A thread's part of its warpgroup's state: rows g and g + 8 of its warp's 16.
template <class Shape>
struct GroupSums {
  float o[Shape::kVDim / 2];
  float m[2], l[2];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < Shape::kVDim / 2; ++i) o[i] = 0.0f;
    for (int i = 0; i < 2; ++i) m[i] = -INFINITY, l[i] = 0.0f;
  }
};
// The units of a list of tiles that a tile of keys has.
template <class Shape>
struct TileUnits {
  static constexpr int kKeys = Shape::kTileKeys < kTileTokens ? Shape::kTileKeys : kTileTokens;
  static constexpr int kUnits = Shape::kTileKeys / kKeys;
  using Named = NamedUnit[kUnits][2];  // for a thread's two rows
};

template <class Shape>
__device__ inline void find_tile(const PrefillCall& call, const PrefillItem& item, int tile, const int (&classes)[2],
                                 typename TileUnits<Shape>::Named& named) {
#pragma unroll
  for (int unit = 0; unit < TileUnits<Shape>::kUnits; ++unit)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      named[unit][i] = find_named<TileUnits<Shape>::kKeys>(call, item, tile * TileUnits<Shape>::kUnits + unit, classes[i]);
}

template <class Shape>
struct GroupState : GroupSums<Shape> {
  uint32_t p[Shape::kPParts][Shape::kTileKeys / 16][4];  // weights of the tile before, as kPParts summands
};

// Multiplies the last summand of K first, as it is the smallest.
template <class Shape>
__device__ inline void multiply_queries(uint32_t q, uint32_t k, float (&s)[Shape::kTileKeys / 2]) {
#pragma unroll
  for (int part = Shape::kKParts - 1; part >= 0; --part)
#pragma unroll
    for (int j = 0; j < Shape::kDim / 16; ++j)
      Wgmma<typename Shape::Number, Shape::kTileKeys>::keys(
          s, describe_matrix(q + j / 4 * (Shape::kRows * 128) + j % 4 * 32, 16),
          describe_matrix(k + part * Shape::kTileBytes + j / 4 * (Shape::kTileKeys * 128) + j % 4 * 32, 16),
          part < Shape::kKParts - 1 || j > 0);
  commit_products();
}

template <class Shape>
__device__ inline void multiply_weights(uint32_t v, GroupState<Shape>& state) {
#pragma unroll
  for (int part = Shape::kPParts - 1; part >= 0; --part)
#pragma unroll
    for (int j = 0; j < Shape::kTileKeys / 16; ++j)
      Wgmma<typename Shape::Number, Shape::kVDim>::values(state.o, state.p[part][j],
                                                          describe_matrix(v + j * 2048, Shape::kTileKeys * 128));
  commit_products();
}

// Turns products into weights. scale: factors from products to logits, of each row. faded: factors that o and l need then.
template <class Shape>
__device__ inline void weigh(const float (&scale)[2], float (&s)[Shape::kTileKeys / 2], GroupSums<Shape>& state,
                             float (&faded)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float most[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // two chains, as a scheduler has one warp of the warpgroup
#pragma unroll
    for (int n = 0; n < Shape::kTileKeys / 8; ++n)
#pragma unroll
      for (int k = 0; k < 2; ++k) most[k] = fmaxf(most[k], s[4 * n + 2 * i + k]);
    float largest = fmaxf(most[0], most[1]);
    for (int mask = 1; mask < 4; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    const float before = state.m[i], now = fmaxf(before, largest * scale[i]);
    const float from = now == -INFINITY ? 0.0f : now - Shape::Number::kShift;  // no key is seen yet
    faded[i] = now == before ? 1.0f : exp2_fast(before - now);
#pragma unroll
    for (int n = 0; n < Shape::kTileKeys / 8; ++n)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float& x = s[4 * n + 2 * i + k];
        x = exp2_fast(fmaf(x, scale[i], -from));
        sum[k] += x;
      }
    state.m[i] = now;
    state.l[i] = state.l[i] * faded[i] + (sum[0] + sum[1]);
  }
}

// Masks the keys of a tile that a thread's rows do not see, by the list of tiles. Most units are seen as a whole or not at
// all, and take no comparison of keys.
template <class Shape>
__device__ inline void mask_named(const RowKeys (&keys)[2], const int (&classes)[2],
                                  const typename TileUnits<Shape>::Named& named, float (&s)[Shape::kTileKeys / 2]) {
  using Units = TileUnits<Shape>;
#pragma unroll
  for (int unit = 0; unit < Units::kUnits; ++unit) {
    RowKeys seen[2];
    bool sees_all[2], is_cut = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const NamedUnit& of = named[unit][i];
      seen[i] = {keys[i].lo - of.token, of.has(classes[i]) ? keys[i].hi - of.token : 0};
      sees_all[i] = seen[i].lo <= 0 && seen[i].hi >= Units::kKeys;
      is_cut |= !sees_all[i] && seen[i].hi > 0;
    }
    if (__all_sync(~0u, sees_all[0] && sees_all[1])) continue;
    float* const own = s + unit * Units::kKeys / 2;
    if (__any_sync(~0u, is_cut)) {
#pragma unroll
      for (int i = 0; i < Units::kKeys / 2; ++i) {
        const int key = i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2, row = i / 2 % 2;
        if (key < seen[row].lo || key >= seen[row].hi) own[i] = -INFINITY;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Units::kKeys / 2; ++i)
        if (!sees_all[i / 2 % 2]) own[i] = -INFINITY;
    }
  }
}

template <class Shape>
__device__ inline void mask_tile(const RowKeys (&keys)[2], int base, float (&s)[Shape::kTileKeys / 2]) {
#pragma unroll
  for (int n = 0; n < Shape::kTileKeys / 8; ++n)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int key = base + 8 * n + threadIdx.x % 4 * 2 + k % 2;
      if (key < keys[k / 2].lo || key >= keys[k / 2].hi) s[4 * n + k] = -INFINITY;
    }
}

template <class Shape>
__device__ inline void keep_weights(const float (&s)[Shape::kTileKeys / 2], GroupState<Shape>& state) {
#pragma unroll
  for (int j = 0; j < Shape::kTileKeys / 16; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t parts[Shape::kPParts];
      split<typename Shape::Number>(s[8 * j + 2 * i], s[8 * j + 2 * i + 1], parts);
#pragma unroll
      for (int part = 0; part < Shape::kPParts; ++part) state.p[part][j][i] = parts[part];
    }
}

template <class Shape>
__device__ inline void fade(const float (&faded)[2], GroupSums<Shape>& state) {
  if (!__any_sync(~0u, faded[0] != 1.0f || faded[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < Shape::kVDim / 2; ++i) state.o[i] *= faded[i / 2 % 2];
}

// Returns the first of the 16 rows that the warp multiplies.
template <class Shape>
__device__ inline int first_row_of_warp() {
  return static_cast<int>(threadIdx.x) / 32 * 16 % Shape::kRows;
}

// A warpgroup's loop over the tiles: all of them, or every second one. scale: factors from products to logits.
template <class Shape>
__device__ inline void attend_tiles(const PrefillCall& call, const PrefillItem& item, uint32_t q,
                                    TileBarriers<Shape> barriers, const float (&scale)[2], GroupState<Shape>& state) {
  constexpr int kStep = Shape::kKeySplits;
  // The shuffle tells the compiler that all lanes have the same value. Without it, products in branches wait for each
  // other.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0), lane = static_cast<int>(threadIdx.x) % 32;
  const int row = first_row_of_warp<Shape>() + lane / 4, first = kStep == 1 ? 0 : group;
  const RowKeys keys[2] = {keys_of_row(call, item, row), keys_of_row(call, item, row + 8)};
  const int classes[2] = {class_of_row(call, item, row), class_of_row(call, item, row + 8)};
  const auto tile_at = [&](bool is_v, int n) { return Shape::tile_at(q + Shape::kQBytes, is_v, n % Shape::kStages); };
  const auto wait_full = [&](bool is_v, int n) {
    wait_barrier(barriers.full(is_v, n % Shape::kStages), n / Shape::kStages % 2);
    if (Shape::kFencesTiles || (Shape::kHasGranules && is_v)) fence_products();
  };
  const auto release = [&](bool is_v, int n) {
    if (lane == 0) arrive(barriers.free(is_v, n % Shape::kStages));
  };
  const int n_tiles = item.end_tile - item.first_tile;
  if (n_tiles <= 0) return;
  if (group == 1) arrive_threads(Shape::kTurn, 256);  // the first turn is warpgroup 0's
  for (int n = first; n < n_tiles; n += kStep) {
    float s[Shape::kTileKeys / 2], faded[2];
    typename TileUnits<Shape>::Named named;
    if (Shape::has_tiles(call)) find_tile<Shape>(call, item, item.first_tile + n, classes, named);
    KeyGranule granule;
    if constexpr (Shape::kHasGranules) granule = find_granule<Shape>(item, item.first_tile + n);
    wait_full(false, n);
    sync_threads(Shape::kTurn + group, 256);
    begin_products();
    multiply_queries<Shape>(q + first_row_of_warp<Shape>() / 64 * 64 * 128, tile_at(false, n), s);
    if (n > first) {
      wait_full(true, n - kStep);
      multiply_weights<Shape>(tile_at(true, n - kStep), state);
      arrive_threads(Shape::kTurn + (group ^ 1), 256);
      wait_for_products<1>();
    } else {
      arrive_threads(Shape::kTurn + (group ^ 1), 256);
      wait_for_products<0>();
    }
    pin(s);
    release(false, n);
    const int tile = item.first_tile + n - item.list_tiles, base = tile * Shape::kTileKeys;
    if (Shape::has_tiles(call))
      mask_named<Shape>(keys, classes, named, s);
    else if (Shape::kHasGranules && tile < 0)
      mask_granules<Shape>(call, item, granule, row, s);
    else if (base < item.common_lo || base + Shape::kTileKeys > item.common_hi)
      mask_tile<Shape>(keys, base, s);
    weigh<Shape>(scale, s, state, faded);
    wait_for_products<0>();
    pin(state.o);
    if (n > first) release(true, n - kStep);
    keep_weights<Shape>(s, state);
    fade<Shape>(faded, state);
  }
  // One turn is left over, for the warpgroup that would be next.
  if (group == (kStep == 1 ? 0 : n_tiles % 2)) sync_threads(Shape::kTurn + group, 256);
  if (first >= n_tiles) return;
  const int last = kStep == 1 || (n_tiles - 1) % 2 == group ? n_tiles - 1 : n_tiles - 2;
  wait_full(true, last);
  begin_products();
  multiply_weights<Shape>(tile_at(true, last), state);
  wait_for_products<0>();
  pin(state.o);
}

// True if the keys leave the L2 cache first: keys that one block reads, of sequences so short that this leaves something in
// the cache. With that hint longer sequences are read 6 % more slowly.
template <class Shape>
__device__ inline bool are_streamed(const PrefillCall& call, const PrefillItem& item) {
  constexpr int64_t kMostBytes = int64_t{128} << 20;
  if (Shape::kHasGranules) return false;  // lists of one sequence name some keys in common
  return call.max_tiles == 1 && int64_t{item.end_place} * call.n_kv_heads * (4 * Shape::kDim) <= kMostBytes;
}

// ---- the kernel --------------------------------------------------------------------------------------------------------

// Stores a warpgroup's state to `to`. With kKeySplits = 1 that is the block's state, of which the warpgroup has half of the
// rows.
template <class Shape>
__device__ inline void store_group(const GroupSums<Shape>& state, float* to) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = first_row_of_warp<Shape>() + lane / 4 + 8 * i;
    float l = state.l[i];
    for (int mask = 1; mask < 4; mask *= 2) l += __shfl_xor_sync(~0u, l, mask);
    if (lane % 4 == 0) reinterpret_cast<float2*>(to + Shape::kRows * Shape::kStateStride)[r] = make_float2(state.m[i], l);
#pragma unroll
    for (int n = 0; n < Shape::kVDim / 8; ++n)
      *reinterpret_cast<float2*>(to + r * Shape::kStateStride + 8 * n + lane % 4 * 2) =
          make_float2(state.o[4 * n + 2 * i], state.o[4 * n + 2 * i + 1]);
  }
}

// Turns a warpgroup's state into output, or into a state that other blocks of the item merge.
template <class Shape>
__device__ inline void finish_group(const PrefillCall& call, const PrefillItem& item, const GroupSums<Shape>& state,
                                    std::byte* shared) {
  Shape::sync();
  auto* const own = reinterpret_cast<float*>(shared);
  store_group<Shape>(state, Shape::kKeySplits == 1 ? own : own + threadIdx.x / 128 * Shape::kStateFloats);
  if (Shape::kKeySplits == 1 && item.n_parts == 1)
    finish_item<Shape>(call, item, own);
  else
    finish_in_cluster<Shape>(call, item, own);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    prefill_sm90_kernel(const __grid_constant__ PrefillCall call, const __grid_constant__ TileMaps<Shape> maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ __align__(8) uint64_t barrier_words[kBarriersOfStage * Shape::kStages];
  let_next_kernel_start();
  const bool finds_late = call.lists.are_written_by_kernels != 0;
  if (finds_late) wait_for_rows(call);
  const PrefillItem item = find_item<Shape>(call);
  if (!finds_late) wait_for_rows(call);
  if (item.piece.n_rows == 0) return wait_for_append(call);
  std::byte* const aligned = shared + (1024 - shared_address(shared) % 1024) % 1024;
  const uint32_t q = shared_address(aligned);
  const TileBarriers<Shape> barriers{shared_address(barrier_words)};
  if (threadIdx.x == 0) {
    prefetch_map(&maps.unit);
    if constexpr (Shape::kHasGranules) prefetch_map(&maps.granule);
    init_barriers(barriers);
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    give_registers<Shape::kHasGranules ? 56 : 40>();
    const uint64_t policy = are_streamed<Shape>(call, item) ? streaming_policy() : reused_policy();
    TileBringer<Shape>{call, item, &maps, q + Shape::kQBytes, barriers, policy}.bring_all();
  } else {
    take_registers<Shape::kHasGranules ? 224 : 232>();
    bring_queries<Shape>(call, item.piece, q);
    GroupState<Shape> state;
    state.clear();
    attend_tiles<Shape>(call, item, q, barriers, {logit_scale(call), logit_scale(call)}, state);
    if (Shape::kHasGranules && item.piece.n_granules < 0) state.l[0] = state.l[1] = NAN;  // the list is wrong
    finish_group<Shape>(call, item, state, aligned);
    wait_for_append(call);  // not the other warps: warps that have ended do not hold up the barriers of a cluster
  }
#endif
}

}  // namespace tandem::cuda
