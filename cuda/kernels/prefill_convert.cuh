// SPDX-License-Identifier: MIT
// Tiles of keys from storage types of 4 and 8 bits to f16, as the products of warpgroups read them (wgmma.cuh): each is
// converted once for all query rows of a block.
//
// An e4m3 number is an f16. A code is one too, as an integer; what belongs to it is its group's scale, which stays apart:
//
//   of K  as f32; sums over a group's dims are multiplied by it
//   of V  as f16 in units of a power of two; weights are multiplied by it. That power is the largest scale's so far: o is in
//         the same units, and weights times scales are in an f16's upper range whatever size V has.
//
// A thread has pieces of 16 dims in registers, on their way from memory while the tile before is converted. Of a warp's
// threads eight have the same dims of neighbouring keys, so that they write to all banks, and four have neighbouring dims.
#pragma once

#include "cuda/kernels/prefill_sm90.cuh"

namespace tandem::cuda {

// ---- 16 dims -----------------------------------------------------------------------------------------------------------

template <class Stored>
struct ConvertPiece;

template <class Convert, int32_t kDtype, class KeyNumber, class ValueNumber, int kGroup>
struct ConvertPiece<Stored8<Convert, kDtype, KeyNumber, ValueNumber, kGroup>> {
  using Codes = uint4;
  __device__ static void to_halves(const Codes& codes, uint32_t (&halves)[8]) {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) Convert::key(words[i], halves[2 * i], halves[2 * i + 1]);
  }
};

template <>
struct ConvertPiece<StoredQ4> {
  using Codes = uint2;
  __device__ static void to_halves(const Codes& codes, uint32_t (&halves)[8]) {
    const uint32_t words[2] = {codes.x, codes.y};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {  // dims i, i + 4 and i + 1, i + 5 of a word
      const uint32_t first = StoredQ4::half_codes(words[i / 4], i % 4 * 4);
      const uint32_t second = StoredQ4::half_codes(words[i / 4], i % 4 * 4 + 4);
      halves[i / 4 * 4 + i % 4 / 2] = __byte_perm(first, second, 0x5410);
      halves[i / 4 * 4 + i % 4 / 2 + 2] = __byte_perm(first, second, 0x7632);
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

inline constexpr int kUnitExponent = 15;  // of an f16 in [1, 2)

// The exponent of the largest scale so far, of the four warps together. A NaN is not one.
struct ScaleUnit {
  uint32_t words;  // [2][4] in shared memory, of every second tile each
  int exponent = 1;

  __device__ void include(int tile, uint32_t largest, int barrier) {
    const uint32_t own = words + tile % 2 * 16;
    largest = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0) store_word(own + threadIdx.x % 128 / 32 * 4, largest);
    sync_threads(barrier, 128);
    for (int i = 0; i < 4; ++i) exponent = max(exponent, static_cast<int>(load_word(own + 4 * i) >> 10));
  }
};

// ---- tiles -------------------------------------------------------------------------------------------------------------

// Of K or V; planes of codes and scales. kIsV: how scales are kept.
template <class Shape, class Stored, bool kIsV>
struct TileCodes {
  using Piece = ConvertPiece<Stored>;
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
        uint32_t halves[8];
        Piece::to_halves(codes[i][block], halves);
        const uint32_t at = to + block * (Shape::kTileKeys * 128);
        store_words(at + swizzled(row(i), part(0) * 2), halves[0], halves[1], halves[2], halves[3]);
        store_words(at + swizzled(row(i), part(0) * 2 + 1), halves[4], halves[5], halves[6], halves[7]);
      }
  }

  __device__ uint32_t largest_scale() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kScaleLoads; ++i)
      if (const uint32_t bits = scales[i] & 0x7fffu; bits < 0x7c00u) largest = max(largest, bits);
    return largest;
  }

  __device__ void store_scales(uint32_t to, int exponent) const {
    const float factor = kIsV ? power_of_two(kUnitExponent - exponent) : 1.0f;
#pragma unroll
    for (int i = 0; i < kScaleLoads; ++i) {
      const int at = 128 * i + static_cast<int>(threadIdx.x) % 128, key = at / kScales, group = at % kScales;
      if (key >= Shape::kTileKeys) continue;
      const float scale = __half2float(__ushort_as_half(scales[i])) * factor;
      if constexpr (kIsV)
        store_half(to + Places::of_key(group, key), scale);
      else
        store_word(to + Places::of_key(group, key), __float_as_uint(scale));
    }
  }
};

// Brings an item's tiles to shared memory, K before V, each when its stage is free.
template <class Shape>
__device__ inline void convert_tiles(const PrefillCall& call, const PrefillItem& item, const typename Shape::Places& places,
                                     TileBarriers<Shape> barriers) {
  const int n_tiles = item.end_tile - item.first_tile;
  UnitWalk walk;
  ScaleUnit unit{places.unit_words};
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
    if constexpr (Shape::kKScales > 0) k.store_scales(places.scales(false, stage), 0);
    fence_products();
    arrive(barriers.full(false, stage));
    if (has_next) find(n + 1), load(k, n + 1);
    if constexpr (Shape::kVScales > 0) unit.include(n, v.largest_scale(), Shape::kSyncConvert);
    wait_barrier(barriers.free(true, stage), parity);
    v.store(places.tile(true, stage));
    if constexpr (Shape::kVScales > 0) {
      v.store_scales(places.scales(true, stage), unit.exponent);
      if (threadIdx.x % 128 == 0) store_word(places.exponent(stage), static_cast<uint32_t>(unit.exponent));
    }
    fence_products();
    arrive(barriers.full(true, stage));
    if (has_next) load(v, n + 1);
  }
}

}  // namespace tandem::cuda
