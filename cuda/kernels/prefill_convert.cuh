// SPDX-License-Identifier: MIT
// Converts tiles of keys from storage types of 4 and 8 bits to f16, which the products of warpgroups read (wgmma.cuh). Each
// tile is converted once for all query rows of a block.
//
// An e4m3 number is an f16. In types with scales a number is a code of up to 8 bits times a scale of 11 bits:
//
//   of K  the sum of two f16, the rounded number and the rest, as a rounding error would show in a row's lse
//   of V  one f16, like the weights that it is multiplied by
//
// No number is too small for f16: scales are f16 themselves, so their multiples are multiples of 2^-24. Numbers beyond
// 65,504, which q8_0 and q4_0 can hold, become infinite.
//
// A thread has codes in registers: it loads the next ones while it converts others. Eight of a warp's threads have the same
// dims of neighbouring keys, so they write to all banks.
#pragma once

#include "cuda/kernels/prefill_sm90.cuh"

namespace tandem::cuda {

// ---- 16 dims -----------------------------------------------------------------------------------------------------------

// to_halves(): converts codes to pairs of f16, of neighbouring dims.
template <class Stored>
struct ConvertPiece;

template <class Convert>
struct ConvertBytes {
  using Codes = uint4;
  __device__ static void to_halves(const Codes& codes, uint32_t (&pairs)[8]) {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) Convert::key(words[i], pairs[2 * i], pairs[2 * i + 1]);
  }
};
template <>
struct ConvertPiece<StoredE4m3> : ConvertBytes<ConvertE4m3> {};
template <>
struct ConvertPiece<StoredQ8> : ConvertBytes<ConvertQ8> {};

template <>
struct ConvertPiece<StoredQ4> {
  using Codes = uint2;
  __device__ static void to_halves(const Codes& codes, uint32_t (&pairs)[8]) {
    const uint32_t words[2] = {codes.x, codes.y};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {  // dims i, i + 4 and i + 1, i + 5 of a word
      const uint32_t first = StoredQ4::half_codes(words[i / 4], i % 4 * 4);
      const uint32_t second = StoredQ4::half_codes(words[i / 4], i % 4 * 4 + 4);
      pairs[i / 4 * 4 + i % 4 / 2] = __byte_perm(first, second, 0x5410);
      pairs[i / 4 * 4 + i % 4 / 2 + 2] = __byte_perm(first, second, 0x7632);
    }
  }
};

// ---- tiles -------------------------------------------------------------------------------------------------------------

__device__ inline __half2 as_halves(uint32_t pair) { return *reinterpret_cast<const __half2*>(&pair); }
__device__ inline uint32_t as_word(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }

// A unit of keys of K or V, at most a page. kSummands: summands of each number. A warp has every fourth group of eight
// keys. Groups of 32 dims are dealt to its threads, two pieces each.
template <class Shape, class Stored, int kPlane, int kSummands>
struct UnitCodes {
  using Piece = ConvertPiece<Stored>;
  static constexpr int kParts = Shape::kDim / 16, kGroups = (kParts + 1) / 2, kOctets = Shape::kUnitKeys / 32;
  static constexpr int kTurns = (kOctets * kGroups + 3) / 4;
  static constexpr bool kHasScales = Stored::kGroup > 0;

  typename Piece::Codes codes[kTurns][2];
  uint16_t scales[kTurns];

  static __device__ int turn_idx(int turn) { return 4 * turn + static_cast<int>(threadIdx.x) % 32 / 8; }
  static __device__ int group(int turn) { return turn_idx(turn) % kGroups; }
  static __device__ int row(int turn) {
    return 8 * (4 * (turn_idx(turn) / kGroups) + static_cast<int>(threadIdx.x) % 128 / 32) +
           static_cast<int>(threadIdx.x) % 8;
  }
  static __device__ bool has(int turn, int half) {
    return (kOctets * kGroups % 4 == 0 || turn_idx(turn) < kOctets * kGroups) &&
           (kParts % 2 == 0 || half == 0 || group(turn) < kGroups - 1);
  }

  // Loads a unit. Its keys [lo, hi) exist. The nearest existing key takes the place of each other key: no row sees these,
  // but they are multiplied.
  __device__ void load(const PrefillCall& call, const PrefillItem& item, TilePlace place, int lo, int hi) {
    const bool is_empty = lo >= Shape::kUnitKeys || hi <= 0;
    const std::byte* from = call.planes[kPlane] + place.page + item.piece.head * call.head_stride[kPlane];
    const std::byte* of_scales = call.planes[kPlane + 1] + place.page + item.piece.head * call.head_stride[kPlane + 1];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int key = place.slot + max(min(row(i), hi - 1), lo);
      codes[i][0] = codes[i][1] = {};
      scales[i] = 0;
      if (is_empty) continue;
      const auto* pieces = reinterpret_cast<const typename Piece::Codes*>(from) + key * kParts + 2 * group(i);
      if (has(i, 0)) codes[i][0] = __ldg(pieces);
      if (has(i, 1)) codes[i][1] = __ldg(pieces + 1);
      if (kHasScales && has(i, 0))
        scales[i] = __ldg(reinterpret_cast<const uint16_t*>(of_scales) + key * kGroups + group(i));
    }
  }

  // Converts a piece to numbers, and to the rest that they leave.
  static __device__ void convert(const typename Piece::Codes& piece, uint16_t scale_bits, uint32_t (&numbers)[8],
                                 uint32_t (&rest)[8]) {
    Piece::to_halves(piece, numbers);
    if constexpr (kHasScales) {
      const __half2 scale = __half2half2(__ushort_as_half(scale_bits));
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const __half2 code = as_halves(numbers[k]), number = __hmul2_rn(code, scale);
        numbers[k] = as_word(number);
        rest[k] = as_word(__hfma2(code, scale, __hneg2(number)));
      }
    }
  }

  // Stores the unit. to: its first row in a tile, or in the tile of the first summand.
  __device__ void store(uint32_t to) const {
#pragma unroll
    for (int i = 0; i < kTurns; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!has(i, half)) continue;
        uint32_t numbers[8], rest[8];
        convert(codes[i][half], scales[i], numbers, rest);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint32_t at =
              to + group(i) / 2 * (Shape::kTileKeys * 128) + swizzled(row(i), group(i) % 2 * 4 + 2 * half + k);
          store_words(at, numbers[4 * k], numbers[4 * k + 1], numbers[4 * k + 2], numbers[4 * k + 3]);
          if constexpr (kSummands == 2)
            store_words(at + Shape::kTileBytes, rest[4 * k], rest[4 * k + 1], rest[4 * k + 2], rest[4 * k + 3]);
        }
      }
  }
};

// The tiles of K or V, one after another. The next tile is loaded from memory while the current one is multiplied.
template <class Shape, class Stored, int kPlane, int kSummands>
struct TileStream {
  static constexpr int kUnits = Shape::kTileKeys / Shape::kUnitKeys;
  UnitCodes<Shape, Stored, kPlane, kSummands> units[kUnits];
  UnitWalk walk;

  __device__ void load(const PrefillCall& call, const PrefillItem& item, int n) {
    if (item.first_tile + n >= item.end_tile) return;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = (item.first_tile + n) * kUnits + i;
      const TilePlace place = find_unit<Shape, Shape::kUnitKeys>(call, item, unit, walk);
      units[i].load(call, item, place, item.lo - place.key, item.hi - place.key);
    }
  }
  // Brings the n-th tile and starts to load the next. The warps that multiply fence the tile: a fence here would wait for
  // the loads.
  __device__ void bring(const PrefillCall& call, const PrefillItem& item, uint32_t k, TileBarriers<Shape> barriers, int n) {
    constexpr bool kIsV = kPlane == kPlaneV;
    const int stage = n % Shape::kStages;
    wait_barrier(barriers.free(kIsV, stage), n / Shape::kStages % 2 ^ 1);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) units[i].store(Shape::tile_at(k, kIsV, stage) + i * Shape::kUnitKeys * 128);
    arrive(barriers.full(kIsV, stage));
    load(call, item, n + 1);
  }
};

// Called by one warpgroup for both, with K a tile ahead of V, as the other side reads them. Or by one warpgroup for each.
template <class Shape>
__device__ inline void convert_tiles(const PrefillCall& call, const PrefillItem& item, uint32_t k,
                                     TileBarriers<Shape> barriers) {
  const int n_tiles = item.end_tile - item.first_tile;
  TileStream<Shape, typename Shape::K, kPlaneK, Shape::kKParts> keys;
  TileStream<Shape, typename Shape::V, kPlaneV, 1> values;
  if constexpr (Shape::kConverters == 2) {
    if (threadIdx.x < 384) {
      keys.load(call, item, 0);
      for (int n = 0; n < n_tiles; ++n) keys.bring(call, item, k, barriers, n);
    } else {
      values.load(call, item, 0);
      for (int n = 0; n < n_tiles; ++n) values.bring(call, item, k, barriers, n);
    }
    return;
  }
  keys.load(call, item, 0);
  values.load(call, item, 0);
  for (int n = 0; n <= n_tiles; ++n) {
    if (n < n_tiles) keys.bring(call, item, k, barriers, n);
    if (n > 0) values.bring(call, item, k, barriers, n - 1);
  }
}

}  // namespace tandem::cuda
