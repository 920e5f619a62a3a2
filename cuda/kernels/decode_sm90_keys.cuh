// SPDX-License-Identifier: MIT
// The keys of a warp of the decode kernel for compute capability 9.0 (decode_sm90.cuh): stages, and units of a range of
// tokens. decode_sm90_lists.cuh has the units of key lists.
#pragma once

#include "cuda/kernels/decode_sm90_shape.cuh"

namespace tandem::cuda {

// A unit in shared memory, and room for its scaled scales of V.
struct Stage {
  uint32_t boxes, scales, scaled;
};

// A warp's stages: boxes, scales, and a barrier for each.
template <class Shape>
struct Pipeline {
  uint32_t boxes, scales, scaled, barriers;
  int stage = 0, parity = 0;  // of the unit that is read next

  __device__ uint32_t box(int s) const { return boxes + s * Shape::kBoxBytes; }
  __device__ uint32_t scale(int s) const { return scales + s * Shape::kScaleBytes; }
  __device__ uint32_t barrier(int s) const { return barriers + 8 * s; }
  __device__ void advance() {
    if (++stage == Shape::kStages) stage = 0, parity ^= 1;
  }
};

struct KeyMaps {
  const CUtensorMap* k;
  const CUtensorMap* v;
  // Maps of granules, for calls with key lists.
  const CUtensorMap* k_granule = nullptr;
  const CUtensorMap* v_granule = nullptr;
};

// Starts copies of kRows rows, from `slot` of a page on, to `at` rows behind the start of a stage.
template <class Shape, int kRows>
__device__ __forceinline__ void bring_rows(const CUtensorMap* k_map, const CUtensorMap* v_map,
                                           const std::byte* const (&head)[kPlanes], int64_t page, int slot, int at,
                                           const Pipeline<Shape>& pipeline, int stage) {
  const uint32_t barrier = pipeline.barrier(stage);
  const auto rows_of = [&](int p, int row_bytes) { return head[p] + page + slot * row_bytes; };
  const uint64_t policy = streaming_policy();
  const auto bring = [&](auto rows, const CUtensorMap* map, int p, uint32_t to) {
    using Rows = decltype(rows);
    const std::byte* const from = rows_of(p, Rows::kRowBytes);
#pragma unroll
    for (int panel = 0; panel < Rows::kCount; ++panel)
      copy_box(to + panel * Rows::kPanelBytes + at * Rows::kWidth, map, panel * Rows::kWidth, from, barrier, policy);
  };
  bring(typename Shape::KRows{}, k_map, kPlaneK, pipeline.box(stage));
  bring(typename Shape::VRows{}, v_map, kPlaneV, pipeline.box(stage) + Shape::KRows::kBytes);
  const auto bring_scales = [&](int n_scales, int p, uint32_t to) {
    if (n_scales > 0)
      copy_bytes(to + 2 * n_scales * at, rows_of(p, 2 * n_scales), static_cast<uint32_t>(2 * n_scales * kRows), barrier);
  };
  bring_scales(Shape::kKScales, kPlaneKScales, pipeline.scale(stage));
  bring_scales(Shape::kVScales, kPlaneVScales, pipeline.scale(stage) + 2 * Shape::kKeys * Shape::kKScales);
}

// ---- without lists -----------------------------------------------------------------------------------------------------

// A warp's walk through the pages: lane i knows the place of its i-th unit from `base` on. No unit is known at first.
struct UnitPlaces {
  static constexpr int kLanes = 1;  // lanes of a unit
  const std::byte* head[kPlanes];   // in the page called 0
  int base = -32;
  int slot = 0;
  int64_t page = 0;  // bytes from the page called 0
};

// Returns a warp's first unit, counted from token 0 of the sequence. With lists: from the item's first unit.
template <class Shape>
__device__ inline int first_unit(const Piece& piece, int warp) {
  const int before = Shape::kHasLists ? 0 : static_cast<int>(piece.key_begin / Shape::kKeys);
  return before + piece.first_unit + warp;
}

template <class Shape>
__device__ inline void look_up(const DecodeCall& call, const Piece& piece, int first, int i, UnitPlaces& places) {
  places.base = i;
  const int unit = first + (i + static_cast<int>(threadIdx.x % 32)) * piece.stride;
  const int page_units = call.page_len / Shape::kKeys, page_idx = divide(unit, page_units);
  places.slot = (unit - page_idx * page_units) * Shape::kKeys;
  if (piece.sequence.begin < piece.sequence.end && int64_t{unit} * Shape::kKeys < piece.sequence.end) {
    const int table_len = piece.sequence.table_len, rounds = page_idx < table_len ? 0 : page_idx / table_len;
    places.page = call.page_tables[piece.sequence.table_begin + page_idx - rounds * table_len];
  }
}

// Starts the copies of the warp's i-th unit.
template <class Shape>
__device__ inline void ask_for_keys(const DecodeCall& call, const KeyMaps& maps, const Piece& piece, int first, int i,
                                    UnitPlaces& places, const Pipeline<Shape>& pipeline, int stage) {
  if (i - places.base >= 32) look_up<Shape>(call, piece, first, i, places);
  const int64_t page = __shfl_sync(~0u, places.page, i - places.base);
  const int slot = __shfl_sync(~0u, places.slot, i - places.base);
  if (!is_elected()) return;
  expect_bytes(pipeline.barrier(stage), Shape::kStageBytes);
  bring_rows<Shape, Shape::kKeys>(maps.k, maps.v, places.head, page, slot, 0, pipeline, stage);
}

// Eight neighbouring keys.
struct EightKeys {
  int64_t token;  // of the first key

  // [lo, hi): the tokens that a row sees.
  __device__ bool is_seen(int key, int64_t lo, int64_t hi) const { return token + key >= lo && token + key < hi; }
};

// A unit in shared memory, from token `key` on.
struct Unit {
  Stage stage;
  bool is_whole;  // every query row sees all of its keys
  int64_t key, begin, end;

  __device__ EightKeys eight(int n) const { return {key + 8 * n}; }
  // Returns a predicate for a key's place in the unit: the key is in [begin, end).
  __device__ auto named() const {
    const int lo = static_cast<int>(max(begin - key, int64_t{0}));
    const int hi = static_cast<int>(min(end - key, int64_t{64}));
    return [lo, hi](int at) { return at >= lo && at < hi; };
  }
};

// Returns the warp's i-th unit. [all_lo, all_hi): the keys that every row sees.
template <class Shape>
__device__ inline Unit find_unit(const Piece& piece, int64_t all_lo, int64_t all_hi, int first, int i, const UnitPlaces&,
                                 const Stage& stage) {
  const int64_t key = int64_t{first + i * piece.stride} * Shape::kKeys;
  return {stage, key >= all_lo && key + Shape::kKeys <= all_hi, key, piece.sequence.begin, piece.sequence.end};
}

template <class Shape>
__device__ inline int64_t sliding_window_of(const DecodeCall& call, const Piece& piece) {
  return Shape::kHasLists ? piece.sliding_window : call.sliding_window;
}

// Zeroes the values of keys that are not named, which may be NaN: their rows or, for codes with scales, their scales.
template <class Shape, class Named>
__device__ inline void clear_values(uint32_t values, uint32_t scales, Named is_named) {
  using Rows = typename Shape::VRows;
  constexpr int kPieces = Rows::kWidth / 16;
  const int lane = threadIdx.x % 32;
  if (Shape::kVScales > 0) {
    for (int at = lane; at < Shape::kKeys * Shape::kVScales; at += 32)
      if (!is_named(at / (Shape::kVScales > 0 ? Shape::kVScales : 1)))
        asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(scales + 2 * at), "h"(uint16_t{0}) : "memory");
  } else {
    for (int at = lane; at < Rows::kBytes / 16; at += 32)
      if (!is_named(at / kPieces % Shape::kKeys))
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(values + 16 * at), "r"(0) : "memory");
  }
  order_before_copies();
  __syncwarp();
}

}  // namespace tandem::cuda
