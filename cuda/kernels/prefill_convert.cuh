// SPDX-License-Identifier: MIT
// Tiles of keys from storage types of 4 and 8 bits to the 16-bit numbers that the products of warpgroups read (wgmma.cuh):
// each is converted once for all query rows of a block.
//
// An e4m3 number is an f16. A code is an f16 and a bf16, as an integer; its group's scale stays apart:
//
//   of K  as f32; sums over a group's dims are multiplied by it
//   of V  as f16; weights are multiplied by it
//
// A thread has pieces of 16 dims in registers, on their way from memory while the tile before is converted. Of a warp's
// threads eight have the same dims of neighbouring keys, so that they write to all banks, and four have neighbouring dims.
#pragma once

#include <type_traits>

#include "cuda/kernels/prefill_sm90.cuh"

namespace tandem::cuda {

// ---- 16 dims -----------------------------------------------------------------------------------------------------------

// to_numbers<Number>(): pairs of neighbouring dims.
template <class Stored>
struct ConvertPiece;

template <>
struct ConvertPiece<StoredE4m3> {
  using Codes = uint4;
  template <class Number>
  __device__ static void to_numbers(const Codes& codes, uint32_t (&pairs)[8]) {
    static_assert(Number::kNarrow);
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) ConvertE4m3::key(words[i], pairs[2 * i], pairs[2 * i + 1]);
  }
};

template <>
struct ConvertPiece<StoredQ8> {
  using Codes = uint4;
  template <class Number>
  __device__ static void to_numbers(const Codes& codes, uint32_t (&pairs)[8]) {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if constexpr (Number::kNarrow) {
        ConvertQ8::key(words[i], pairs[2 * i], pairs[2 * i + 1]);
      } else {
        pairs[2 * i] = ConvertQ8::bfloats(__byte_perm(words[i], 0, 0x4140));
        pairs[2 * i + 1] = ConvertQ8::bfloats(__byte_perm(words[i], 0, 0x4342));
      }
  }
};

template <>
struct ConvertPiece<StoredQ4> {
  using Codes = uint2;
  template <class Number>
  __device__ static uint32_t pair(uint32_t word, int shift) {
    if constexpr (Number::kNarrow)
      return StoredQ4::half_codes(word, shift);
    else
      return StoredQ4::bfloat_codes(word, shift);
  }
  template <class Number>
  __device__ static void to_numbers(const Codes& codes, uint32_t (&pairs)[8]) {
    const uint32_t words[2] = {codes.x, codes.y};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {  // dims i, i + 4 and i + 1, i + 5 of a word
      const uint32_t first = pair<Number>(words[i / 4], i % 4 * 4), second = pair<Number>(words[i / 4], i % 4 * 4 + 4);
      pairs[i / 4 * 4 + i % 4 / 2] = __byte_perm(first, second, 0x5410);
      pairs[i / 4 * 4 + i % 4 / 2 + 2] = __byte_perm(first, second, 0x7632);
    }
  }
};

// ---- scales ------------------------------------------------------------------------------------------------------------

// Where the scales of a tile lie: [groups][4][kTileKeys / 4], for the four columns of threads of a C fragment the keys that
// they have, in order.
template <int kTileKeys, int kBytes>
struct ScalePlaces {
  static constexpr int kStride = kTileKeys / 4 * kBytes % 64 == 0 ? kTileKeys / 4 * kBytes + 16 : kTileKeys / 4 * kBytes;
  static constexpr int kGroupBytes = 4 * kStride;  // strides: four threads read 16 bytes each of different banks
  __device__ static int of_thread(int group, int t) { return group * kGroupBytes + t * kStride; }
  __device__ static int of_key(int group, int key) {
    return of_thread(group, key % 8 / 2) + (key / 8 * 2 + key % 2) * kBytes;
  }
};

// ---- tiles -------------------------------------------------------------------------------------------------------------

// Of K or V; planes of codes and scales. kIsV: how scales are kept.
template <class Shape, class Stored, bool kIsV>
struct TileCodes {
  using Piece = ConvertPiece<Stored>;
  using Number = std::conditional_t<kIsV, typename Stored::ValueNumber, typename Stored::KeyNumber>;
  static constexpr int kDim = Shape::kVDim, kParts = kDim / 16, kPlane = kIsV ? kPlaneV : kPlaneK;
  static constexpr int kPieceBytes = sizeof(typename Piece::Codes), kRowBytes = kParts * kPieceBytes;
  static constexpr int kOctets = Shape::kTileKeys / 32, kScales = Stored::kGroup > 0 ? (kDim + 31) / 32 : 0;
  static constexpr int kScaleLoads = (Shape::kTileKeys * kScales + 127) / 128;
  using Places = ScalePlaces<Shape::kTileKeys, kIsV ? 2 : 4>;

  typename Piece::Codes codes[kOctets][Shape::kBlocksOf64];
  uint16_t scales[kScaleLoads > 0 ? kScaleLoads : 1];

  static __device__ int row(int octet) {
    return 8 * (4 * octet + static_cast<int>(threadIdx.x) % 128 / 32) + static_cast<int>(threadIdx.x) % 8;
  }
  static __device__ int part(int block) { return 4 * block + static_cast<int>(threadIdx.x) % 32 / 8; }

  // lo, hi: which of the tile's keys there are. The others become codes that are numbers, and scales of 0.
  __device__ void load(const PrefillCall& call, const PrefillItem& item, TilePlace place, int lo, int hi) {
    const std::byte* from = call.planes[kPlane] + place.page + item.piece.head * call.head_stride[kPlane] +
                            (place.slot + row(0)) * kRowBytes + part(0) * kPieceBytes;
#pragma unroll
    for (int i = 0; i < kOctets; ++i)
#pragma unroll
      for (int block = 0; block < Shape::kBlocksOf64; ++block) {
        codes[i][block] = {};
        if (part(block) < kParts && row(i) >= lo && row(i) < hi)
          codes[i][block] =
              __ldg(reinterpret_cast<const typename Piece::Codes*>(from + i * 32 * kRowBytes + block * 4 * kPieceBytes));
      }
    if constexpr (kScales > 0) {
      const auto* rows = reinterpret_cast<const uint16_t*>(call.planes[kPlane + 1] + place.page +
                                                           item.piece.head * call.head_stride[kPlane + 1] +
                                                           int64_t{place.slot} * (2 * kScales));
#pragma unroll
      for (int i = 0; i < kScaleLoads; ++i) {
        const int at = 128 * i + static_cast<int>(threadIdx.x) % 128, key = at / kScales;
        scales[i] = key >= lo && key < min(hi, Shape::kTileKeys) ? __ldg(rows + at) : 0;
      }
    }
  }

  __device__ void store(uint32_t to) const {
#pragma unroll
    for (int i = 0; i < kOctets; ++i)
#pragma unroll
      for (int block = 0; block < Shape::kBlocksOf64; ++block) {
        if (part(block) >= kParts) continue;
        uint32_t pairs[8];
        Piece::template to_numbers<Number>(codes[i][block], pairs);
        const uint32_t at = to + block * (Shape::kTileKeys * 128);
        store_words(at + swizzled(row(i), part(0) * 2), pairs[0], pairs[1], pairs[2], pairs[3]);
        store_words(at + swizzled(row(i), part(0) * 2 + 1), pairs[4], pairs[5], pairs[6], pairs[7]);
      }
  }

  __device__ void store_scales(uint32_t to) const {
#pragma unroll
    for (int i = 0; i < kScaleLoads; ++i) {
      const int at = 128 * i + static_cast<int>(threadIdx.x) % 128, key = at / kScales, group = at % kScales;
      if (key >= Shape::kTileKeys) continue;
      if constexpr (kIsV)
        store_half(to + Places::of_key(group, key), scales[i]);
      else
        store_word(to + Places::of_key(group, key), __float_as_uint(__half2float(__ushort_as_half(scales[i]))));
    }
  }
};

// Brings an item's tiles to shared memory, K before V, each when its stage is free.
template <class Shape>
__device__ inline void convert_tiles(const PrefillCall& call, const PrefillItem& item, const typename Shape::Places& places,
                                     TileBarriers<Shape> barriers) {
  const int n_tiles = item.end_tile - item.first_tile;
  UnitWalk walk;
  typename Shape::KCodes k;
  typename Shape::VCodes v;
  TilePlace place{};
  const auto load = [&](auto& codes, int n) {
    const int first = (item.first_tile + n) * Shape::kTileKeys;
    codes.load(call, item, place, item.lo - first, item.hi - first);
  };
  const auto find = [&](int n) { place = find_unit<Shape::kTileKeys>(call, item, item.first_tile + n, walk); };
  if (n_tiles <= 0) return;
  find(0);
  load(k, 0);
  load(v, 0);
  for (int n = 0; n < n_tiles; ++n) {
    const int stage = n % Shape::kStages, parity = n / Shape::kStages % 2 ^ 1;
    const bool has_next = n + 1 < n_tiles;
    wait_barrier(barriers.free(false, stage), parity);
    k.store(places.tile(false, stage));
    if constexpr (Shape::kKScales > 0) k.store_scales(places.scales(false, stage));
    fence_products();
    arrive(barriers.full(false, stage));
    if (has_next) find(n + 1), load(k, n + 1);
    wait_barrier(barriers.free(true, stage), parity);
    v.store(places.tile(true, stage));
    if constexpr (Shape::kVScales > 0) v.store_scales(places.scales(true, stage));
    fence_products();
    arrive(barriers.full(true, stage));
    if (has_next) load(v, n + 1);
  }
}

}  // namespace tandem::cuda
