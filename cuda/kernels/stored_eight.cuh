// SPDX-License-Identifier: MIT
// Products of 16 stored rows and eight query rows on the matrix unit, straight from registers. A lane has eight
// neighbouring numbers of a row in memory order.
//
//   lane 4 r + j    numbers 32 c + 8 j .. + 7 of keys r and r + 8 and of query row r
//                   gets the products of these keys and query rows 2 j, 2 j + 1
//
// Factors of these products are bf16. Numbers with more bits are sums of several bf16. q8_0 and q4_0 are codes, which are
// bf16 numbers, and a factor for each 32 of them.
#pragma once

#include "cuda/kernels/round.cuh"
#include "cuda/kernels/stored.cuh"
#include "cuda/kernels/warp_ops.cuh"
#include "lib/tables/device.h"

namespace tandem::cuda {

inline constexpr int kEight = 2 * kLaneNumbers;
inline constexpr int kChunk = 32;   // dims: eight of each of four lanes
inline constexpr int kKeys = 2;     // keys of a lane, eight apart; a tile has eight times as many
inline constexpr int kColumns = 8;  // query heads at a time

template <int kParts>
__device__ inline void split_eight(const float (&x)[kEight], uint32_t (&parts)[kParts][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t of_pair[kParts];
    split<Bfloat>(x[2 * i], x[2 * i + 1], of_pair);
#pragma unroll
    for (int p = 0; p < kParts; ++p) parts[p][i] = of_pair[p];
  }
}

// Eight numbers of a stored row, unconverted.
template <int32_t kType>
struct StoredEight {
  static constexpr int kBits = kType == TANDEM_F32                            ? 32
                               : kType == TANDEM_F16 || kType == TANDEM_BF16  ? 16
                               : kType == TANDEM_E4M3 || kType == TANDEM_Q8_0 ? 8
                                                                              : 4;
  static constexpr bool kHasScale = kType == TANDEM_Q8_0 || kType == TANDEM_Q4_0;
  static constexpr int kWords = kBits / 4, kGroup = 32;
  uint32_t words[kWords];
  uint32_t scale;

  // at: place in the row. n: numbers of the row, a multiple of four. Numbers behind the row's end are finite if the row is
  // finite.
  __device__ void load(const std::byte* row, const std::byte* scales, int at, int n) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    if (kHasScale) scale = at / kGroup * kGroup < n ? __ldg(reinterpret_cast<const uint16_t*>(scales) + at / kGroup) : 0;
    if (at >= n) return;
    const std::byte* const from = row + at * kBits / 8;
    if (n % kEight == 0)
      load_whole(from);
    else
      load_fours(from, at + kLaneNumbers < n);
  }

  __device__ void load_whole(const std::byte* from) {
    if constexpr (kWords >= 4) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
        words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
      }
    } else if constexpr (kWords == 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
      words[0] = two.x, words[1] = two.y;
    } else {
      words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
    }
  }

  // Loads rows that are aligned to four numbers only.
  __device__ void load_fours(const std::byte* from, bool has_second) {
    if constexpr (kWords == 1) {
      const auto* halves = reinterpret_cast<const uint16_t*>(from);
      words[0] = __ldg(halves) | (has_second ? static_cast<uint32_t>(__ldg(halves + 1)) : 0u) << 16;
    } else {
      const auto* at = reinterpret_cast<const uint32_t*>(from);
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        if (i < kWords / 2 || has_second) words[i] = __ldg(at + i);
    }
  }

  __device__ float factor() const { return kHasScale ? __half2float(__ushort_as_half(static_cast<uint16_t>(scale))) : 1.0f; }
  // Converts the numbers to f32, without the factor.
  __device__ void widen(float (&x)[kEight]) const {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const uint32_t word = words[i * kBits / 32];
      if constexpr (kType == TANDEM_F32) x[i] = __uint_as_float(word);
      if constexpr (kType == TANDEM_BF16) x[i] = __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
      if constexpr (kType == TANDEM_F16) x[i] = half_of(word, i % 2);
      if constexpr (kType == TANDEM_E4M3) x[i] = half_of(ConvertE4m3::halves(word >> i % 4 / 2 * 16), i % 2);
      // The f32 number 2^23 + x has x in its last bits.
      if constexpr (kType == TANDEM_Q8_0)
        x[i] = __uint_as_float(__byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7440u + i % 4)) - 8388736.0f;
      if constexpr (kType == TANDEM_Q4_0) x[i] = __uint_as_float((word >> 4 * i & 0xfu) | 0x4b000000u) - 8388616.0f;
    }
  }
  // The numbers as kParts summands, in pairs.
  static constexpr int kParts = kType == TANDEM_F32 ? 3 : kType == TANDEM_F16 ? 2 : 1;
  __device__ void split_up(uint32_t (&parts)[kParts][4]) const {
    if constexpr (kType == TANDEM_BF16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) parts[0][i] = words[i];
    } else {
      float x[kEight];
      widen(x);
      split_eight(x, parts);
    }
  }

  __device__ static float half_of(uint32_t pair, int i) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(pair >> 16 * i)));
  }
};

// Eight numbers of a query's row. kPlain: the row is bf16 and begins at a multiple of 16 bytes. Else it has any type and
// any alignment.
template <bool kPlain>
struct QueryEight {
  static constexpr int kParts = kPlain ? 1 : 3;
  uint32_t parts[kParts][4];

  __device__ void load(const DeviceRows& q, int64_t first, int at, int dim, bool is_there) {
    uint4 fours[2] = {};
    if constexpr (kPlain) {
      if (is_there && at < dim)
        fours[0] = __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(q.data) + first + at));
      parts[0][0] = fours[0].x, parts[0][1] = fours[0].y, parts[0][2] = fours[0].z, parts[0][3] = fours[0].w;
    } else {
      float x[2][kLaneNumbers];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (is_there && at + i * kLaneNumbers < dim) fours[i] = load_four(q.data, q.dtype, first + at + i * kLaneNumbers);
        widen_four(q.dtype, fours[i], x[i]);
      }
      split_eight({x[0][0], x[0][1], x[0][2], x[0][3], x[1][0], x[1][1], x[1][2], x[1][3]}, parts);
    }
  }
};

// Adds the products of 16 keys, two of each lane, and eight query heads over 32 dims. Products of small parts come first.
// Products of two parts that lie below the last bit of an f32 are left out.
template <class Keys, class Query>
__device__ inline void multiply_chunk(const Keys (&keys)[kKeys], const Query& q, float (&sums)[2 * kKeys]) {
  uint32_t parts[2][Keys::kParts][4];
  keys[0].split_up(parts[0]);
  keys[1].split_up(parts[1]);
  constexpr int kLeast = Keys::kParts > Query::kParts ? Keys::kParts : Query::kParts;  // summands for exactness in f32
  float products[4] = {};
#pragma unroll
  for (int both = kLeast - 1; both >= 0; --both)
#pragma unroll
    for (int p = 0; p <= both; ++p) {
      const int r = both - p;
      if (p >= Keys::kParts || r >= Query::kParts) continue;
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t a[4] = {parts[0][p][i], parts[1][p][i], parts[0][p][i + 1], parts[1][p][i + 1]};
        Bfloat::multiply(products, a, {q.parts[r][i], q.parts[r][i + 1]});
      }
    }
  const float factors[2] = {keys[0].factor(), keys[1].factor()};
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = Keys::kHasScale ? fmaf(factors[i / 2], products[i], sums[i]) : sums[i] + products[i];
}

// n / by. Most n fit into 32 bits, and the 32-bit division takes a third of the time.
__device__ inline int64_t divide(int64_t n, int32_t by) {
  return n >> 31 == 0 ? static_cast<int64_t>(static_cast<uint32_t>(n) / static_cast<uint32_t>(by)) : n / by;
}

// True if q is bf16 and every eight of its numbers begin at a multiple of 16 bytes.
inline bool is_plain(const DeviceRows& q, int32_t dim) {
  return q.dtype == TANDEM_BF16 && dim % kEight == 0 && reinterpret_cast<uintptr_t>(q.data) % 16 == 0 &&
         q.token_stride % kEight == 0 && q.head_stride % kEight == 0;
}

}  // namespace tandem::cuda
