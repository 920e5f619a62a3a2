// SPDX-License-Identifier: MIT
// Storage types as matrix products read them: one struct per type.
//
// In shared memory 16 rows (keys) of a type lie stride() bytes apart. That is an odd number of 16-byte pieces, so 8 rows
// never share a bank. From there
//
//   keys(a, row, j, lane)    gives A [16 keys x 16 dims] of the j-th 16 dims, as kParts summands;
//   values(a, row, b, lane)  gives A [16 dims x 16 keys] of the b-th 16 dims, as kParts summands;
//   key_dim(j, t, i)         says which dim is element i of a thread's four columns of keys(). Dims may come in any order,
//                            as long as q has the same order;
//   value_dim(b, r)          which dim is row r of values().
//
// Types with codes of 4 or 8 bits are read by words, and converted between load and product. Types with scales multiply
// codes as integers, and apply scales to sums (K) or to weights (V).
#pragma once

#include "cuda/kernels/warp_ops.cuh"
#include "tandem/tandem.h"

namespace tandem::cuda {

// Returns where a lane's row of a matrix begins: 16 bytes, `next` pieces behind piece `piece` of a key.
__device__ inline uint32_t matrix_row(uint32_t base, int stride, int piece, int key, int next) {
  return base + key * stride + (piece + next) * 16;
}

template <class Number_, int32_t kDtype_>
struct Stored16 {
  using KeyNumber = Number_;
  using ValueNumber = Number_;
  static constexpr int32_t kDtype = kDtype_;
  static constexpr int kBits = 16, kGroup = 0, kParts = 1, kStep = 16;
  __device__ static void keys(uint32_t (&a)[1][4], uint32_t base, int stride, int j, int lane) {
    load_matrices(a[0], matrix_row(base, stride, 2 * j, lane % 16, lane / 16));
  }
  __device__ static void values(uint32_t (&a)[1][4], uint32_t base, int stride, int b, int lane) {
    load_transposed(a[0], matrix_row(base, stride, 2 * b, lane % 8 + lane / 16 * 8, lane / 8 % 2));
  }
  __host__ __device__ static constexpr int key_dim(int j, int t, int i) { return 16 * j + 2 * t + i % 2 + i / 2 * 8; }
  __host__ __device__ static constexpr int value_dim(int b, int r) { return 16 * b + r; }
};

// Types of 8 bits: four neighbouring dims of a key are a word.
template <class Convert, int32_t kDtype_, class KeyNumber_, class ValueNumber_, int kGroup_>
struct Stored8 {
  using KeyNumber = KeyNumber_;
  using ValueNumber = ValueNumber_;
  static constexpr int32_t kDtype = kDtype_;
  static constexpr int kBits = 8, kGroup = kGroup_, kParts = 1, kStep = 16;
  __device__ static void keys(uint32_t (&a)[1][4], uint32_t base, int stride, int j, int lane) {
    const uint32_t at = base + lane / 4 * stride + 16 * j + lane % 4 * 4;
    Convert::key(load_word(at), a[0][0], a[0][2]);
    Convert::key(load_word(at + 8 * stride), a[0][1], a[0][3]);
  }
  // An element of the loaded matrix is two dims of a key.
  __device__ static void values(uint32_t (&a)[1][4], uint32_t base, int stride, int b, int lane) {
    uint32_t first, second;
    load_two_transposed(first, second, matrix_row(base, stride, b, lane % 16, 0));
    Convert::value(first, a[0][0], a[0][1]);
    Convert::value(second, a[0][2], a[0][3]);
  }
  __host__ __device__ static constexpr int key_dim(int j, int t, int i) { return 16 * j + 4 * t + i; }
  __host__ __device__ static constexpr int value_dim(int b, int r) { return 16 * b + r % 8 * 2 + r / 8; }
};

// The f16 number 1024 + x has x in its last bits.
struct ConvertQ8 {
  __device__ static uint32_t minus_1152(uint32_t pair) {
    const __half2 x = *reinterpret_cast<const __half2*>(&pair), offset = __half2half2(__ushort_as_half(0x6480));
    const __half2 code = __hsub2(x, offset);
    return *reinterpret_cast<const uint32_t*>(&code);
  }
  __device__ static void key(uint32_t codes, uint32_t& low, uint32_t& high) {
    codes ^= 0x80808080u;
    low = minus_1152(__byte_perm(codes, 0x64646464u, 0x4140));
    high = minus_1152(__byte_perm(codes, 0x64646464u, 0x4342));
  }
  // Converts the lower byte of each half. A bf16 has 128 + x, for x < 128, with x in its last bits, and 256 is 128 with the
  // next bit set. So the number that is subtracted is 128 more for a code with its sign set.
  __device__ static uint32_t bfloats(uint32_t codes) {
    const uint32_t magnitude = (codes & 0x007f007fu) | 0x43004300u, offset = (codes & 0x00800080u) | 0x43004300u;
    const __nv_bfloat162 code =
        __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&magnitude), *reinterpret_cast<const __nv_bfloat162*>(&offset));
    return *reinterpret_cast<const uint32_t*>(&code);
  }
  __device__ static void value(uint32_t codes, uint32_t& even, uint32_t& odd) {
    even = bfloats(codes);
    odd = bfloats(codes >> 8);
  }
};

// Every e4m3 number is an f16.
struct ConvertE4m3 {
  __device__ static uint32_t halves(uint32_t pair) {  // from the two lower bytes
#if __CUDA_ARCH__ >= 890
    uint32_t result;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(result) : "h"(static_cast<uint16_t>(pair)));
    return result;
#else
    const uint32_t wide = __byte_perm(pair, 0, 0x1404);  // each byte in the upper byte of its half
    const uint32_t magnitude = wide & 0x7f007f00u, nan = __vcmpeq2(magnitude, 0x7f007f00u) & 0x7c017c01u;
    const uint32_t bits = magnitude >> 1;  // the bias of the exponent is 8 less
    const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&bits), __half2half2(__ushort_as_half(0x5c00)));
    return *reinterpret_cast<const uint32_t*>(&value) | (wide & 0x80008000u) | nan;
#endif
  }
  __device__ static void key(uint32_t codes, uint32_t& low, uint32_t& high) {
    low = halves(codes);
    high = halves(codes >> 16);
  }
  __device__ static void value(uint32_t codes, uint32_t& even, uint32_t& odd) {
    even = halves(__byte_perm(codes, 0, 0x0020));
    odd = halves(__byte_perm(codes, 0, 0x0031));
  }
};

// q4_0: a word is eight neighbouring dims of a key, and the lower half of a byte comes first. Codes are 8 more than their
// numbers.
struct StoredQ4 {
  using KeyNumber = Half;
  using ValueNumber = Bfloat;
  static constexpr int32_t kDtype = TANDEM_Q4_0;
  static constexpr int kBits = 4, kGroup = 32, kParts = 1, kStep = 32;
  __device__ static uint32_t half_codes(uint32_t word, int shift) {
    const uint32_t pair = (word >> shift & 0x000f000fu) | 0x64006400u;
    const __half2 code = __hsub2(*reinterpret_cast<const __half2*>(&pair), __half2half2(__ushort_as_half(0x6408)));
    return *reinterpret_cast<const uint32_t*>(&code);
  }
  __device__ static uint32_t bfloat_codes(uint32_t word, int shift) {  // 128 + x has x in the last bits
    const uint32_t pair = (word >> shift & 0x000f000fu) | 0x43004300u;
    const __nv_bfloat162 offset = __bfloat162bfloat162(__ushort_as_bfloat16(0x4308));
    const __nv_bfloat162 code = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&pair), offset);
    return *reinterpret_cast<const uint32_t*>(&code);
  }
  __device__ static void keys(uint32_t (&a)[1][4], uint32_t base, int stride, int j, int lane) {
    const uint32_t at = base + lane / 4 * stride + j / 2 * 16 + lane % 4 * 4;
    const uint32_t first = load_word(at), second = load_word(at + 8 * stride);
    const int shift = j % 2 * 8;
    a[0][0] = half_codes(first, shift);
    a[0][1] = half_codes(second, shift);
    a[0][2] = half_codes(first, shift + 4);
    a[0][3] = half_codes(second, shift + 4);
  }
  // An element of the loaded matrix is four dims of a key. Two blocks of 16 dims share a load.
  __device__ static void values(uint32_t (&a)[1][4], uint32_t base, int stride, int b, int lane) {
    uint32_t first, second;
    load_two_transposed(first, second, matrix_row(base, stride, b / 2, lane % 16, 0));
    const int shift = b % 2 * 8;
    a[0][0] = bfloat_codes(first, shift);
    a[0][1] = bfloat_codes(first, shift + 4);
    a[0][2] = bfloat_codes(second, shift);
    a[0][3] = bfloat_codes(second, shift + 4);
  }
  __host__ __device__ static constexpr int key_dim(int j, int t, int i) {
    return j / 2 * 32 + 8 * t + j % 2 * 2 + i / 2 + i % 2 * 4;
  }
  __host__ __device__ static constexpr int value_dim(int b, int r) { return b / 2 * 32 + r % 8 * 4 + b % 2 * 2 + r / 8; }
};

// f32: three bf16 hold all bits.
struct StoredF32 {
  using KeyNumber = Bfloat;
  using ValueNumber = Bfloat;
  static constexpr int32_t kDtype = TANDEM_F32;
  static constexpr int kBits = 32, kGroup = 0, kParts = 3, kStep = 16;
  __device__ static float number(uint32_t at) { return __uint_as_float(load_word(at)); }
  __device__ static void keys(uint32_t (&a)[3][4], uint32_t base, int stride, int j, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t at = base + (lane / 4 + i % 2 * 8) * stride + 4 * key_dim(j, lane % 4, i / 2 * 2);
      uint32_t parts[3];
      split<Bfloat>(number(at), number(at + 4), parts);
      for (int p = 0; p < 3; ++p) a[p][i] = parts[p];
    }
  }
  __device__ static void values(uint32_t (&a)[3][4], uint32_t base, int stride, int b, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t at = base + (lane % 4 * 2 + i / 2 * 8) * stride + 4 * value_dim(b, lane / 4 + i % 2 * 8);
      uint32_t parts[3];
      split<Bfloat>(number(at), number(at + stride), parts);
      for (int p = 0; p < 3; ++p) a[p][i] = parts[p];
    }
  }
  __host__ __device__ static constexpr int key_dim(int j, int t, int i) { return 16 * j + 2 * t + i % 2 + i / 2 * 8; }
  __host__ __device__ static constexpr int value_dim(int b, int r) { return 16 * b + r; }
};

using StoredF16 = Stored16<Half, TANDEM_F16>;
using StoredBf16 = Stored16<Bfloat, TANDEM_BF16>;
using StoredE4m3 = Stored8<ConvertE4m3, TANDEM_E4M3, Half, Half, 0>;
using StoredQ8 = Stored8<ConvertQ8, TANDEM_Q8_0, Half, Bfloat, 32>;

// The layout of rows of kDim elements of a type in shared memory, and of their scales.
template <class Stored, int kDim>
struct RowShape {
  static constexpr int kBytes = kDim * Stored::kBits / 8;
  static constexpr int kPiece = kBytes % 16 == 0 ? 16 : 8;  // bytes of a copy
  static constexpr int kPieces = kBytes / kPiece;
  static constexpr int kStride = ((kBytes + 15) / 16 | 1) * 16;
  static constexpr int kScales =
      Stored::kGroup == 0 ? 0 : (kDim + Stored::kGroup - 1) / (Stored::kGroup > 0 ? Stored::kGroup : 1);
  static constexpr int kSteps = (kDim + Stored::kStep - 1) / Stored::kStep * Stored::kStep / 16;  // steps of 16 dims
  static constexpr int kSliceBytes = 16 * kStride + 32 * kScales;  // bytes of 16 keys and their scales
};

// Copies 16 rows of a plane and their scales. Rows outside [lo, hi), which may reach beyond the 16, become zeros, and the
// kernel does not use their scales. Nothing is read for such rows.
template <class Row>
__device__ inline void copy_slice(uint32_t to, const std::byte* rows, const std::byte* scales, int lo, int hi) {
  const int lane = threadIdx.x % 32;
  const bool is_whole = lo <= 0 && hi >= 16;
#pragma unroll
  for (int i = 0; i < (16 * Row::kPieces + 31) / 32; ++i) {
    const int at = i * 32 + lane, key = at / Row::kPieces, piece = at % Row::kPieces;
    if (16 * Row::kPieces % 32 != 0 && key >= 16) continue;
    if (is_whole)
      copy_async<Row::kPiece>(to + key * Row::kStride + piece * Row::kPiece, rows + at * Row::kPiece);
    else
      copy_async<Row::kPiece>(to + key * Row::kStride + piece * Row::kPiece, rows + at * Row::kPiece, key >= lo && key < hi);
  }
  if (Row::kScales > 0 && lane < 2 * Row::kScales)
    copy_async<16>(to + 16 * Row::kStride + 16 * lane, scales + 16 * lane, lo < hi);
}

__device__ inline float load_scale(uint32_t at) {
  uint16_t bits;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(bits) : "r"(at) : "memory");
  return __half2float(__ushort_as_half(bits));
}

}  // namespace tandem::cuda
