// SPDX-License-Identifier: MIT
// Storage types as the decode kernel of compute capability 9.0 multiplies them: one struct per type, over rows in panels
// (bulk_copy.cuh). Place c of 8 keys holds key key_of(c). Fragments count places.
//
//   keys(b, at, j)      B [16 dims x 8 keys] for every 8 keys, of kKeySteps steps from j on; at: the lane's key_row()
//   values(a, at, b)    A [16 dims x 16 keys] for every 16 keys, of kValueSteps blocks from b on; at: value_row() of V.
//                       Its parameter K is the keys' type, whose order places have
//   key_dim(j, t, i)    which dim is element i of a thread's four of a step. Dims may come in any order, if q has the same
//   value_dim(b, r)     which dim is row r of a block
//
// place_of() is the inverse of key_of().
//
// Codes become integers. Put into the last bits of an f16, a code reads as 1024 plus the code. The offset of 1024 and the
// offset of the codes are subtracted. (Left in, or as the subnormal numbers that codes would be without 1024, they would
// cost products their last bits: a sum cuts these off by the possible first bit of its largest number.) The upper code of a
// byte stays in place and is 16 times as large: key_factor(), value_factor().
#pragma once

#include "cuda/kernels/bulk_copy.cuh"
#include "cuda/kernels/warp_ops.cuh"
#include "tandem/tandem.h"

namespace tandem::cuda {

__device__ inline uint2 load_two_words(uint32_t at) {
  uint2 words;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n" : "=r"(words.x), "=r"(words.y) : "r"(at) : "memory");
  return words;
}

// Puts two codes into the last bits of f16 numbers and subtracts an offset. mask: the bits of the codes.
__device__ inline uint32_t take_codes(uint32_t word, uint32_t mask, int offset) {
  const uint32_t offsets = (0x6400u + static_cast<uint32_t>(offset)) * 0x10001u;
  uint32_t codes, result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(codes) : "r"(word), "r"(mask), "r"(0x64006400u));  // word & mask | ...
  asm("sub.rn.f16x2 %0, %1, %2;\n" : "=r"(result) : "r"(codes), "r"(offsets));
  return result;
}

template <class Number_, int32_t kDtype_>
struct Panel16 {
  using KeyNumber = Number_;
  using ValueNumber = Number_;
  static constexpr int32_t kDtype = kDtype_;
  static constexpr int kBits = 16, kGroup = 0, kKeySteps = 1, kValueSteps = 1, kRound = 1;
  static constexpr int kShift = Number_::kShift;
  __host__ __device__ static constexpr int key_of(int c) { return c; }
  __host__ __device__ static constexpr int key_dim(int j, int t, int i) { return 16 * j + 2 * t + i % 2 + i / 2 * 8; }
  __host__ __device__ static constexpr int value_dim(int b, int r) { return 16 * b + r; }
  __host__ __device__ static constexpr float key_factor(int) { return 1.0f; }
  __host__ __device__ static constexpr float value_factor(int) { return 1.0f; }

  template <class P>
  __device__ static uint32_t key_row(uint32_t base, int lane) {
    return P::row(base, lane % 16, lane / 16);
  }
  template <class P>
  __device__ static void keys(uint32_t (&b)[1][P::kKeys / 8][2], uint32_t at, int j) {
#pragma unroll
    for (int n = 0; n < P::kKeys / 8; n += 2) {
      uint32_t m[4];
      load_matrices(m, P::at(at, 2 * j) + n * 8 * P::kWidth);
      b[0][n][0] = m[0], b[0][n + 1][0] = m[1], b[0][n][1] = m[2], b[0][n + 1][1] = m[3];
    }
  }
  template <class P, class K>
  __device__ static uint32_t value_row(uint32_t base, int lane) {
    return P::row(base, K::key_of(lane % 8) + lane / 16 * 8, lane / 8 % 2);
  }
  template <class P>
  __device__ static void values(uint32_t (&a)[P::kKeys / 16][1][4], uint32_t at, int b) {
#pragma unroll
    for (int k = 0; k < P::kKeys / 16; ++k) load_transposed(a[k][0], P::at(at, 2 * b) + k * 16 * P::kWidth);
  }
};

// Types of 8 bits. A lane loads 8 bytes of a key, for two steps. This order of keys keeps half a warp's loads in different
// banks.
template <class Convert, int32_t kDtype_, int kGroup_>
struct Panel8 : Convert {
  using KeyNumber = Half;
  using ValueNumber = Half;
  static constexpr int32_t kDtype = kDtype_;
  static constexpr int kBits = 8, kGroup = kGroup_, kKeySteps = 2, kValueSteps = 2, kRound = 2, kShift = Half::kShift;
  __host__ __device__ static constexpr int key_of(int c) { return c % 4 * 2 + c / 4; }
  __host__ __device__ static constexpr int place_of(int key) { return key / 2 + key % 2 * 4; }
  __host__ __device__ static constexpr int value_dim(int b, int r) { return 16 * b + r % 8 * 2 + r / 8; }
  __host__ __device__ static constexpr float key_factor(int) { return 1.0f; }
  __host__ __device__ static constexpr float value_factor(int) { return 1.0f; }

  template <class P>
  __device__ static uint32_t key_row(uint32_t base, int lane) {
    return P::row(base, key_of(lane / 4), lane / 2 % 2) + lane % 2 * 8;
  }
  template <class P>
  __device__ static void keys(uint32_t (&b)[2][P::kKeys / 8][2], uint32_t at, int j) {
#pragma unroll
    for (int n = 0; n < P::kKeys / 8; ++n) {
      const uint2 codes = load_two_words(P::at(at, j) + n * 8 * P::kWidth);
      Convert::key(codes.x, b[0][n][0], b[0][n][1]);
      Convert::key(codes.y, b[1][n][0], b[1][n][1]);
    }
  }
  // An element of the loaded matrix is two dims of a key.
  template <class P, class K>
  __device__ static uint32_t value_row(uint32_t base, int lane) {
    return P::row(base, K::key_of(lane % 8) + lane / 8 % 2 * 8, lane / 16);
  }
  template <class P>
  __device__ static void values(uint32_t (&a)[P::kKeys / 16][2][4], uint32_t at, int b) {
#pragma unroll
    for (int k = 0; k < P::kKeys / 16; ++k) {
      uint32_t m[4];
      load_transposed(m, P::at(at, b) + k * 16 * P::kWidth);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Convert::value(m[2 * i], a[k][i][0], a[k][i][1]);
        Convert::value(m[2 * i + 1], a[k][i][2], a[k][i][3]);
      }
    }
  }
};

struct CodesQ8 {
  __host__ __device__ static constexpr int key_dim(int j, int t, int i) {
    return j / 2 * 32 + 8 * t + j % 2 * 4 + i % 2 * 2 + i / 2;
  }
  __device__ static void key(uint32_t codes, uint32_t& even, uint32_t& odd) {
    codes ^= 0x80808080u;
    even = take_codes(codes, 0x00ff00ffu, 128);
    odd = take_codes(codes >> 8, 0x00ff00ffu, 128);
  }
  __device__ static void value(uint32_t codes, uint32_t& even, uint32_t& odd) { key(codes, even, odd); }
};

// Every e4m3 number is an f16, and is converted to it.
struct CodesE4m3 {
  __host__ __device__ static constexpr int key_dim(int j, int t, int i) { return j / 2 * 32 + 8 * t + j % 2 * 4 + i; }
  __device__ static uint32_t halves(uint32_t pair) {  // from the two lower bytes
    uint32_t result;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(result) : "h"(static_cast<uint16_t>(pair)));
    return result;
  }
  __device__ static void key(uint32_t codes, uint32_t& low, uint32_t& high) {
    low = halves(codes);
    high = halves(codes >> 16);
  }
  __device__ static void value(uint32_t codes, uint32_t& even, uint32_t& odd) {
    const uint32_t apart = __byte_perm(codes, 0, 0x3120);
    even = halves(apart);
    odd = halves(apart >> 16);
  }
};

// q4_0: a word is eight neighbouring dims of a key, and the lower half of a byte comes first.
struct PanelQ4 {
  using KeyNumber = Half;
  using ValueNumber = Half;
  static constexpr int32_t kDtype = TANDEM_Q4_0;
  static constexpr int kBits = 4, kGroup = 32, kKeySteps = 2, kValueSteps = 4, kRound = 2, kShift = Half::kShift;
  __host__ __device__ static constexpr int key_of(int c) { return c; }
  __host__ __device__ static constexpr int place_of(int key) { return key; }
  __host__ __device__ static constexpr int key_dim(int j, int t, int i) {
    return j / 2 * 32 + 8 * t + j % 2 * 2 + i / 2 + i % 2 * 4;
  }
  __host__ __device__ static constexpr int value_dim(int b, int r) { return b / 2 * 32 + r % 8 * 4 + b % 2 * 2 + r / 8; }
  __host__ __device__ static constexpr float key_factor(int i) { return i / 2 == 0 ? 1.0f : 0.0625f; }
  __host__ __device__ static constexpr float value_factor(int r) { return r / 8 == 0 ? 1.0f : 0.0625f; }

  // Takes dims 0 and 4 of a word's eight (lower), and 1 and 5 (upper). The word shifted by 8 bits gives the other four.
  __device__ static void codes(uint32_t word, uint32_t& lower, uint32_t& upper) {
    lower = take_codes(word, 0x000f000fu, 8);
    upper = take_codes(word, 0x00f000f0u, 128);
  }
  template <class P>
  __device__ static uint32_t key_row(uint32_t base, int lane) {
    return P::row(base, lane / 4, 0) + lane % 4 * 4;
  }
  template <class P>
  __device__ static void keys(uint32_t (&b)[2][P::kKeys / 8][2], uint32_t at, int j) {
#pragma unroll
    for (int n = 0; n < P::kKeys / 8; ++n) {
      const uint32_t word = load_word(P::at(at, j / 2) + n * 8 * P::kWidth);
      codes(word, b[0][n][0], b[0][n][1]);
      codes(word >> 8, b[1][n][0], b[1][n][1]);
    }
  }
  // An element of the loaded matrix is four dims of a key.
  template <class P, class K>
  __device__ static uint32_t value_row(uint32_t base, int lane) {
    return P::row(base, K::key_of(lane % 8) + lane / 8 % 2 * 8, lane / 16);
  }
  template <class P>
  __device__ static void values(uint32_t (&a)[P::kKeys / 16][4][4], uint32_t at, int b) {
#pragma unroll
    for (int k = 0; k < P::kKeys / 16; ++k) {
      uint32_t m[4];
      load_transposed(m, P::at(at, b / 2) + k * 16 * P::kWidth);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes(m[i / 2 * 2] >> i % 2 * 8, a[k][i][0], a[k][i][1]);
        codes(m[i / 2 * 2 + 1] >> i % 2 * 8, a[k][i][2], a[k][i][3]);
      }
    }
  }
};

using PanelF16 = Panel16<Half, TANDEM_F16>;
using PanelBf16 = Panel16<Bfloat, TANDEM_BF16>;
using PanelE4m3 = Panel8<CodesE4m3, TANDEM_E4M3, 0>;
using PanelQ8 = Panel8<CodesQ8, TANDEM_Q8_0, 32>;

}  // namespace tandem::cuda
