// SPDX-License-Identifier: MIT
// Slices of key lists (lib/tables/key_list.h) in the decode kernel (decode.cuh). A warp's 16 keys of a unit are two
// granules, or the next 16 keys of the range, which then are described as granules, too.
#pragma once

#include "cuda/kernels/decode_work.cuh"
#include "cuda/kernels/stored.cuh"

namespace tandem::cuda {

// A warp's walk through a list. Each unit from `base` on has two lanes, and each lane knows eight of the warp's keys.
// `before` keeps the last units, as units are attended after the copies of the next ones have started.
struct ListWalk {
  static constexpr int kUnits = 16;

  struct Named {
    int token = 0;
    uint32_t keys = 0;
  };
  int base = -kUnits;
  Named now, before;
  int slot = 0;
  int64_t page = 0;  // bytes from the page called 0
};

// Looks up the walk's next units. unit: index in the item. Nothing is read later for keys that are not named.
template <class Shape>
__device__ inline void look_up(const DecodeCall& call, const Piece& piece, int unit, ListWalk& walk) {
  const int lane = threadIdx.x % 32, own = unit + lane / 2, warp = threadIdx.x / 32;
  walk.base = unit;
  walk.before = walk.now;
  if (own < piece.list_units) {
    const int at = own * (Shape::kUnitKeys / kGranuleKeys) + 2 * warp + lane % 2;
    const KeyGranule granule = piece.granules[min(at, piece.n_granules - 1)];
    const uint32_t seen = granule_bits(granule.token, piece.seen_begin, INT64_MAX);
    walk.now = {granule.token, at < piece.n_granules ? granule.keys & seen : 0u};
    walk.slot = granule.token % call.page_len;
    walk.page = granule.page;
    return;
  }
  const DeviceSequence& sequence = piece.sequence;
  const auto first = static_cast<int>(piece.key_begin) + (own - piece.list_units) * Shape::kUnitKeys;
  const int token = first + warp * 16 + lane % 2 * kGranuleKeys;
  walk.now = {token, granule_bits(token, sequence.begin, sequence.end)};
  walk.slot = token % call.page_len;
  walk.page = sequence.begin < sequence.end && first < sequence.end
                  ? call.page_tables[sequence.table_begin + token / call.page_len % sequence.table_len]
                  : 0;
}

// Copies two granules of a plane and their scales. Rows that are not named become zeros. Their scales are copied.
template <class Row>
__device__ inline void copy_granules(uint32_t to, const std::byte* const (&rows)[2], const std::byte* const (&scales)[2],
                                     uint32_t named) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < (16 * Row::kPieces + 31) / 32; ++i) {
    const int at = i * 32 + lane, key = at / Row::kPieces, piece = at % Row::kPieces;
    if (16 * Row::kPieces % 32 != 0 && key >= 16) continue;
    const std::byte* const from = (key < 8 ? rows[0] : rows[1]) + (key % 8 * Row::kPieces + piece) * Row::kPiece;
    copy_async<Row::kPiece>(to + key * Row::kStride + piece * Row::kPiece, from, (named >> key & 1) != 0);
  }
  if (Row::kScales > 0 && lane < 2 * Row::kScales) {
    const int half = lane / (Row::kScales > 0 ? Row::kScales : 1);
    copy_async<16>(to + 16 * Row::kStride + 16 * lane,
                   (half == 0 ? scales[0] : scales[1]) + 16 * (lane - half * Row::kScales), (named >> 8 * half & 0xff) != 0);
  }
}

// Copies the warp's 16 keys of a unit.
template <class Shape>
__device__ inline void copy_keys(const DecodeCall& call, const Piece& piece, int unit, ListWalk& walk, uint32_t stage) {
  if (unit - walk.base >= ListWalk::kUnits) look_up<Shape>(call, piece, unit, walk);
  const int first_lane = 2 * (unit - walk.base);
  int64_t page[2];
  int slot[2];
  uint32_t named = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    page[half] = __shfl_sync(~0u, walk.page, first_lane + half);
    slot[half] = __shfl_sync(~0u, walk.slot, first_lane + half);
    named |= __shfl_sync(~0u, walk.now.keys, first_lane + half) << 8 * half;
  }
  const auto copy = [&]<class Row>(Row, int plane, uint32_t to) {
    const std::byte *rows[2], *scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto place = [&](int p, int row_bytes) {
        return call.planes[p] + page[half] + piece.head * call.head_stride[p] + slot[half] * row_bytes;
      };
      rows[half] = place(plane, Row::kBytes);
      scales[half] = place(plane + 1, 2 * Row::kScales);
    }
    copy_granules<Row>(to, rows, scales, named);
  };
  static_assert(kPlaneKScales == kPlaneK + 1 && kPlaneVScales == kPlaneV + 1);
  copy(typename Shape::KRow{}, kPlaneK, stage);
  copy(typename Shape::VRow{}, kPlaneV, stage + Shape::KRow::kSliceBytes);
}

// 16 keys in shared memory. Bit i of `named`: key i is named.
struct ListSlice {
  bool is_whole;  // every query row sees all 16 keys
  int token[2];
  uint32_t named;

  __device__ bool is_seen(int at, int64_t from, int64_t to) const {
    const int64_t own = (at < 8 ? token[0] : token[1] - 8) + at;
    return is_named(at) && own >= from && own < to;
  }
  __device__ bool is_named(int at) const { return (named >> at & 1) != 0; }
  __device__ bool has_all() const { return named == 0xffffu; }
};

template <class Shape>
__device__ inline ListSlice find_slice(const Piece&, int64_t all_lo, int64_t all_hi, int unit, const ListWalk& walk) {
  const bool is_before = unit < walk.base;
  const int token = is_before ? walk.before.token : walk.now.token;
  const uint32_t keys = is_before ? walk.before.keys : walk.now.keys;
  const int first_lane = 2 * (unit - walk.base + (is_before ? ListWalk::kUnits : 0));
  ListSlice slice;
  slice.named = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    slice.token[half] = __shfl_sync(~0u, token, first_lane + half);
    slice.named |= __shfl_sync(~0u, keys, first_lane + half) << 8 * half;
  }
  slice.is_whole = slice.has_all() && min(slice.token[0], slice.token[1]) >= all_lo &&
                   max(slice.token[0], slice.token[1]) + kGranuleKeys <= all_hi;
  return slice;
}

}  // namespace tandem::cuda
