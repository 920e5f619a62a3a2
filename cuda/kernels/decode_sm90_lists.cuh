// SPDX-License-Identifier: MIT
// Units of key lists (lib/tables/key_list.h) in the decode kernel for compute capability 9.0 (decode_sm90.cuh).
//
// A unit is kKeys keys: granules of the list or, after these, the next keys of the range. The lane that knows a granule
// starts its copies. For a range one lane starts them all, as without lists. In both cases the keys of a unit are described
// as granules. A unit that lacks granules repeats its last one, without named keys, so a stage always receives as many
// bytes.
#pragma once

#include "cuda/kernels/decode_sm90_keys.cuh"

namespace tandem::cuda {

// A warp's walk through a list. Each unit from `base` on has kLanes lanes, and each lane knows eight keys. `before` keeps
// the last units, as units are attended after the copies of the next ones have started.
template <class Shape>
struct ListPlaces {
  static constexpr int kLanes = Shape::kKeys / kGranuleKeys, kUnits = 32 / kLanes;
  static_assert(Shape::kStages <= kUnits);

  struct Named {
    int token = 0;
    uint32_t keys = 0;
  };
  const std::byte* head[kPlanes];  // in the page called 0
  int base = -kUnits;
  Named now, before;
  int slot = 0;
  int64_t page = 0;  // bytes from the page called 0
};

// Looks up which of the eight tokens from `token` on are in the sequence's range, and their place.
template <class Shape>
__device__ inline void look_up_range(const DecodeCall& call, const Piece& piece, int token, ListPlaces<Shape>& places) {
  const DeviceSequence& sequence = piece.sequence;
  places.now = {token, granule_bits(token, sequence.begin, sequence.end)};
  const int first = token / Shape::kKeys * Shape::kKeys;  // first token of its unit, which lies in one page
  const int page_idx = divide(token, call.page_len);
  places.slot = token - page_idx * call.page_len;
  if (sequence.begin >= sequence.end || first >= sequence.end) return;
  const int table_len = sequence.table_len, rounds = page_idx < table_len ? 0 : page_idx / table_len;
  places.page = call.page_tables[sequence.table_begin + page_idx - rounds * table_len];
}

// Looks up the walk's next units. first: the warp's first unit, of the item's.
template <class Shape>
__device__ inline void look_up(const DecodeCall& call, const Piece& piece, int first, int i, ListPlaces<Shape>& places) {
  using Places = ListPlaces<Shape>;
  places.base = i;
  places.before = places.now;
  const int lane = threadIdx.x % 32, unit = first + (i + lane / Places::kLanes) * piece.stride;
  if (unit >= piece.list_units) {
    const auto range_unit = static_cast<int>(piece.key_begin / Shape::kKeys) + unit - piece.list_units;
    return look_up_range<Shape>(call, piece, range_unit * Shape::kKeys + lane % Places::kLanes * kGranuleKeys, places);
  }
  const int at = unit * Places::kLanes + lane % Places::kLanes;
  const KeyGranule granule = piece.granules[min(at, piece.n_granules - 1)];
  const uint32_t seen = granule_bits(granule.token, piece.seen_begin, INT64_MAX);
  places.now = {granule.token, at < piece.n_granules ? granule.keys & seen : 0u};
  places.slot = granule.token - divide(granule.token, call.page_len) * call.page_len;
  places.page = granule.page;
}

// Starts the copies of the warp's i-th unit.
template <class Shape>
__device__ __forceinline__ void ask_for_keys(const DecodeCall& call, const KeyMaps& maps, const Piece& piece, int first,
                                             int i, ListPlaces<Shape>& places, const Pipeline<Shape>& pipeline, int stage) {
  using Places = ListPlaces<Shape>;
  if (i - places.base >= Places::kUnits) look_up<Shape>(call, piece, first, i, places);
  const int first_lane = (i - places.base) * Places::kLanes;
  if (first + i * piece.stride >= piece.list_units) {
    const int64_t page = __shfl_sync(~0u, places.page, first_lane);
    const int slot = __shfl_sync(~0u, places.slot, first_lane);
    if (!is_elected()) return;
    expect_bytes(pipeline.barrier(stage), Shape::kStageBytes);
    return bring_rows<Shape, Shape::kKeys>(maps.k, maps.v, places.head, page, slot, 0, pipeline, stage);
  }
  if (is_elected()) expect_bytes(pipeline.barrier(stage), Shape::kStageBytes);
  __syncwarp();
  const int own = static_cast<int>(threadIdx.x % 32) - first_lane;
  if (own < 0 || own >= Places::kLanes) return;
  bring_rows<Shape, kGranuleKeys>(maps.k_granule, maps.v_granule, places.head, places.page, places.slot, own * kGranuleKeys,
                                  pipeline, stage);
}

// Eight neighbouring keys. Bit i of `keys`: key i is named.
struct NamedEightKeys {
  int token;
  uint32_t keys;

  __device__ bool is_seen(int key, int64_t lo, int64_t hi) const {
    return (keys >> key & 1) != 0 && token + key >= lo && token + key < hi;
  }
};

// As Unit. All lanes of the warp call eight() and named() with the same arguments.
template <class Shape>
struct ListUnit {
  Stage stage;
  bool is_whole;
  int token;  // the first of the lane's eight keys
  uint32_t keys;
  int first_lane;  // the first lane that knows the unit

  __device__ NamedEightKeys eight(int n) const {
    return {__shfl_sync(~0u, token, first_lane + n), __shfl_sync(~0u, keys, first_lane + n)};
  }
  __device__ auto named() const {
    uint64_t all = 0;
#pragma unroll
    for (int n = 0; n < Shape::kKeys / kGranuleKeys; ++n)
      all |= static_cast<uint64_t>(__shfl_sync(~0u, keys, first_lane + n)) << kGranuleKeys * n;
    return [all](int at) { return (all >> at & 1) != 0; };
  }
};

template <class Shape>
__device__ inline ListUnit<Shape> find_unit(const Piece&, int64_t all_lo, int64_t all_hi, int, int i,
                                            const ListPlaces<Shape>& places, const Stage& stage) {
  using Places = ListPlaces<Shape>;
  const bool is_before = i < places.base;
  const int token = is_before ? places.before.token : places.now.token;
  const uint32_t keys = is_before ? places.before.keys : places.now.keys;
  const int first_lane = (i - places.base + (is_before ? Places::kUnits : 0)) * Places::kLanes;
  const int own = static_cast<int>(threadIdx.x % 32) - first_lane;
  const bool sees_all = keys == 0xffu && token >= all_lo && token + kGranuleKeys <= all_hi;
  return {stage, __all_sync(~0u, own < 0 || own >= Places::kLanes || sees_all) != 0, token, keys, first_lane};
}

template <class Shape>
struct PlacesOf {
  using Type = UnitPlaces;
};
template <class Shape>
requires(Shape::kHasLists) struct PlacesOf<Shape> {
  using Type = ListPlaces<Shape>;
};
template <class Shape>
using Places = typename PlacesOf<Shape>::Type;

}  // namespace tandem::cuda
