// SPDX-License-Identifier: MIT
// MatrixKernels for Intel AMX. matrix_kernels.h explains the method.
//
// exp((x - m) scale) = 2^n 2^f with n + f = (x - m) scale / ln 2; the largest x has exponent 0 whatever its size. 2^f for
// f| <= 1/2 is a polynomial of degree 5 (relative error 2^-23.1). Results below 2^-126 are 0.
#pragma once

#include "cpu/kernels/amx_bf16_inl.h"
#include "cpu/kernels/matrix_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

inline void split_planes(const float* from, int64_t n, int32_t n_planes, uint16_t* to, int64_t plane) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = n - i < 16 ? static_cast<__mmask16>((1u << (n - i)) - 1) : static_cast<__mmask16>(0xffff);
    __m512 rest = _mm512_maskz_loadu_ps(mask, from + i);
    for (int32_t p = 0; p < n_planes; ++p) {
      const __m256i part = _mm512_cvtepi32_epi16(_mm512_srli_epi32(next_part(&rest), 16));
      _mm256_mask_storeu_epi16(to + p * plane + i, mask, part);
    }
  }
}

// Returns the numbers a in the lower halves of the words and b in the upper ones, rounded to nearest. Highway's target lacks
// AVX512_BF16, but every processor with AMX has it.
HWY_INLINE __m512i nearest_bf16(__m512 a, __m512 b) {
  __m512i halves;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(halves) : "v"(b), "v"(a));
  return halves;
}

// Returns 16 f32 minus 16 bf16.
HWY_INLINE __m512i less_bf16(__m512 x, __m256i bf16) {
  const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16);
  return _mm512_castps_si512(_mm512_sub_ps(x, _mm512_castsi512_ps(wide)));
}

// Splits 32 f16 into exact sums of two bf16. An f16 has 11 bits; after the first, rounded part 2 bits and a sign remain. For
// Inf and NaN the second part may be NaN.
HWY_INLINE void split_f16(__m512i x, __m512i* first, __m512i* second) {
  const __m512i odd_words = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                             23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(x)), high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
  *first = nearest_bf16(low, high);
  *second = _mm512_permutex2var_epi16(less_bf16(low, _mm512_castsi512_si256(*first)), odd_words,
                                      less_bf16(high, _mm512_extracti64x4_epi64(*first, 1)));
}

inline void split_halves(const uint8_t* from, int64_t n, uint16_t* to, int64_t plane) {
  for (int64_t i = 0; i < n; i += 32) {
    __m512i first, second;
    split_f16(_mm512_loadu_si512(from + 2 * i), &first, &second);
    _mm512_store_si512(to + i, first);
    _mm512_store_si512(to + plane + i, second);
  }
}

// Returns the mask of the first n of 32 bf16.
HWY_INLINE __mmask32 first_halves(int64_t n) { return n >= 32 ? 0xffffffffu : (1u << n) - 1; }

inline void pack_queries(const uint16_t* rows, int64_t stride, int64_t dims, uint16_t* tiles) {
  for (int64_t d = 0; d < dims; d += kMatrixDepth, tiles += kMatrixTileBytes / 2) {
    __m512i x[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) x[r] = _mm512_maskz_loadu_epi16(first_halves(dims - d), rows + r * stride + d);
    transpose_words(x);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) _mm512_store_si512(tiles + 32 * r, x[r]);
  }
}

// Loads 8 dims of keys r, r + 8, r + 16 and r + 24, a lane each.
HWY_INLINE __m512i load_lanes(const uint8_t* const* rows, int64_t at) {
  const auto lane = [&](int i) HWY_ATTR { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[8 * i] + at)); };
  __m512i x = _mm512_castsi128_si512(lane(0));
  x = _mm512_mask_broadcast_i32x4(x, 0x00f0, lane(1));
  x = _mm512_mask_broadcast_i32x4(x, 0x0f00, lane(2));
  return _mm512_mask_broadcast_i32x4(x, 0xf000, lane(3));
}

// Transposes eight dims at a time. The loads bring eight keys into each lane, and 8 x 8 are transposed within the lane. bf16
// is stored as it is, f16 in its two planes.
template <bool kIsF16>
void transpose_rows(const uint8_t* const* rows, int32_t n_keys, int32_t dims, uint16_t* tiles, int64_t plane) {
  const auto put = [plane](uint16_t* to, __m512i x) HWY_ATTR {
    if (!kIsF16) return _mm512_store_si512(to, x);
    __m512i first, second;
    split_f16(x, &first, &second);
    _mm512_store_si512(to, first);
    _mm512_store_si512(to + plane, second);
  };
  constexpr int64_t kBlock = kMatrixKeys / kMatrixDepth * kMatrixTileBytes / 2;  // elements of 16 dims
  for (int32_t j = 0; j < n_keys; j += kMatrixDepth, tiles += kMatrixTileBytes / 2) {
    for (int32_t d = 0; d < dims; d += 8) {
      __m512i x[8], y[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) x[r] = load_lanes(rows + j + r, 2 * d);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {  // y: pairs of keys; dims 0 to 3, then 4 to 7
        y[i] = _mm512_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
        y[4 + i] = _mm512_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {  // x: four keys; dims 2 i and 2 i + 1
        const int half = i / 2 * 4;
        x[2 * i] = i % 2 == 0 ? _mm512_unpacklo_epi32(y[half], y[half + 1]) : _mm512_unpackhi_epi32(y[half], y[half + 1]);
        x[2 * i + 1] =
            i % 2 == 0 ? _mm512_unpacklo_epi32(y[half + 2], y[half + 3]) : _mm512_unpackhi_epi32(y[half + 2], y[half + 3]);
      }
      uint16_t* to = tiles + d / 16 * kBlock + d % 16 * 32;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        put(to + 64 * i, _mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1]));
        put(to + 64 * i + 32, _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]));
      }
    }
  }
}

void transpose_values(const uint8_t* const* rows, int32_t n_keys, int32_t dims, uint16_t* tiles) {
  transpose_rows<false>(rows, n_keys, dims, tiles, 0);
}

void transpose_halves(const uint8_t* const* rows, int32_t n_keys, int32_t dims, uint16_t* tiles, int64_t plane) {
  transpose_rows<true>(rows, n_keys, dims, tiles, plane);
}

// Tiles 0 to 3 hold C: blocks 0 and 1 of the first column group, then of the second. Tiles 4 and 5 hold A, 6 and 7 B.
template <int kBlocks, int kGroups>
HWY_INLINE void multiply_block(const MatrixProduct& m, int64_t block) {
  float *c0 = m.c + block * kTileFloats, *c2 = c0 + m.c_group;
  if (m.accumulate) {
    TANDEM_TILE_LOAD(0, c0, int64_t{64});
    if (kBlocks > 1) TANDEM_TILE_LOAD(1, c0 + kTileFloats, int64_t{64});
    if (kGroups > 1) TANDEM_TILE_LOAD(2, c2, int64_t{64});
    if (kBlocks > 1 && kGroups > 1) TANDEM_TILE_LOAD(3, c2 + kTileFloats, int64_t{64});
  } else {  // a fifth faster here than loads of zeros, unlike in short chains of products
    asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" ::);
  }
  for (int32_t step = 0; step < m.n_steps; ++step) {
    const uint8_t *a0 = m.a[block] + step * m.a_step, *a1 = kBlocks > 1 ? m.a[block + 1] + step * m.a_step : nullptr;
    const uint8_t *b0 = m.b + step * kMatrixTileBytes, *b1 = b0 + m.b_group;
    int64_t loaded = -1;
    for (int32_t pair = m.n_pairs; pair-- > 0;) {  // a plane of A stays for all its planes of B; small products first
      const int64_t a = m.pairs[pair].a, b = m.pairs[pair].b;
      if (a != loaded) {
        TANDEM_TILE_LOAD(4, a0 + a, m.a_stride);
        if (kBlocks > 1) TANDEM_TILE_LOAD(5, a1 + a, m.a_stride);
        loaded = a;
      }
      TANDEM_TILE_LOAD(6, b0 + b, int64_t{64});
      TANDEM_TILE_DOT(0, 4, 6);
      if (kBlocks > 1) TANDEM_TILE_DOT(1, 5, 6);
      if (kGroups > 1) {
        TANDEM_TILE_LOAD(7, b1 + b, int64_t{64});
        TANDEM_TILE_DOT(2, 4, 7);
        if (kBlocks > 1) TANDEM_TILE_DOT(3, 5, 7);
      }
    }
  }
  TANDEM_TILE_STORE(0, c0);
  if (kBlocks > 1) TANDEM_TILE_STORE(1, c0 + kTileFloats);
  if (kGroups > 1) TANDEM_TILE_STORE(2, c2);
  if (kBlocks > 1 && kGroups > 1) TANDEM_TILE_STORE(3, c2 + kTileFloats);
}

template <int kGroups>
HWY_INLINE void multiply_blocks(const MatrixProduct& m) {
  int64_t block = 0;
  for (; block + 2 <= m.n_blocks; block += 2) multiply_block<2, kGroups>(m, block);
  if (block < m.n_blocks) multiply_block<1, kGroups>(m, block);
}

void multiply_matrix(const MatrixProduct& m) { m.n_groups > 1 ? multiply_blocks<2>(m) : multiply_blocks<1>(m); }

// exp(d factor) for d <= 0 or NaN. scale: `factor` in units of ln 2. least: the d below which the result falls below 2^-126.
// Adding 1.5 * 2^23 rounds and leaves n in the low bits.
struct Exponential {
  __m512 scale, least;
  explicit HWY_INLINE Exponential(float factor)
      : scale(_mm512_set1_ps(factor * 1.44269504f)), least(_mm512_set1_ps(-126.0f / (factor * 1.44269504f))) {}
  HWY_INLINE __m512 of(__m512 d) const {
    const __m512 round = _mm512_set1_ps(12582912.0f), shifted = _mm512_fmadd_ps(d, scale, round);
    const __m512 f = _mm512_fmsub_ps(d, scale, _mm512_sub_ps(shifted, round));
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0x1.5bba14p-10f), f, _mm512_set1_ps(0x1.3cea88p-7f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c6b752p-5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebf9bcp-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e42ap-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    const __mmask16 seen = _mm512_cmp_ps_mask(d, least, _CMP_NLT_UQ);  // NaN stays
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_maskz_add_epi32(seen, _mm512_castps_si512(p), exponent));
  }
};

// Returns the largest of `max` and the visible products; NaN if one of them is not finite.
template <bool kMasked>
HWY_INLINE __m512 column_maximum(const MatrixSoftmax& t, __m512 max) {
  __m512 most[4] = {max, max, max, max}, poison[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int32_t j = 0; j < t.n_keys; j += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512 x = _mm512_load_ps(t.s + 16 * (j + i));
      if (kMasked) {
        const __mmask16 seen = t.visible[j + i];
        most[i] = _mm512_mask_max_ps(most[i], seen, most[i], x);
        poison[i % 2] = _mm512_mask3_fmadd_ps(x, _mm512_setzero_ps(), poison[i % 2], seen);
      } else {
        most[i] = _mm512_max_ps(most[i], x);
        poison[i % 2] = _mm512_fmadd_ps(x, _mm512_setzero_ps(), poison[i % 2]);
      }
    }
  }
  const __m512 all = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
  // _mm512_max_ps returns its second operand if one is NaN, so a NaN in `max` stays.
  return _mm512_add_ps(_mm512_max_ps(all, max), _mm512_add_ps(poison[0], poison[1]));
}

// Stores the weights of two keys as pairs, and leaves in p0 and p1 what the planes do not hold. Weights are finite or NaN;
// NaN stays NaN in the sum of the planes.
template <int kPlanes>
HWY_INLINE void store_weights(__m512& p0, __m512& p1, uint16_t* to, int64_t plane) {
  const __m512i sides = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
#pragma GCC unroll 3
  for (int i = 0; i < kPlanes; ++i) {
    __m512i pairs;
    if (kPlanes < kMaxPlanes)
      pairs = _mm512_permutexvar_epi16(sides, nearest_bf16(p0, p1));
    else
      pairs =
          _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(p0), 16), _mm512_and_si512(_mm512_castps_si512(p1), upper));
    _mm512_store_si512(to + i * plane, pairs);
    p0 = _mm512_sub_ps(p0, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
    p1 = _mm512_sub_ps(p1, _mm512_castsi512_ps(_mm512_and_si512(pairs, upper)));
  }
}

struct Ahead {
  const MatrixSoftmax& t;
  int32_t idx = 0;
  int64_t byte = 0;
  HWY_INLINE void lines(int64_t n) {
    for (; n > 0 && idx < t.n_ahead; --n) {
      __builtin_prefetch(t.ahead[idx] + byte, 0, 2);  // to the second level: the first is full of the operands
      byte += kLine;
      if (byte >= t.ahead_bytes) byte = 0, ++idx;
    }
  }
};

template <bool kMasked, int kPlanes>
HWY_INLINE __m512 column_exponentials(const MatrixSoftmax& t, __m512 base) {
  const Exponential exponential(t.scale);
  __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  Ahead ahead{t};
  // lines due for every two keys
  const int64_t n_lines = (t.n_ahead * ((t.ahead_bytes + 63) / 64) * 2 + t.n_keys - 1) / t.n_keys;
  for (int32_t j = 0; j < t.n_keys; j += 2) {
    ahead.lines(n_lines);
    __m512 p[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512 x = _mm512_load_ps(t.s + 16 * (j + i));
      p[i] = exponential.of(_mm512_sub_ps(x, base));
      if (kMasked) p[i] = _mm512_maskz_mov_ps(t.visible[j + i], p[i]);
      sum[i] = _mm512_add_ps(sum[i], p[i]);
    }
    store_weights<kPlanes>(p[0], p[1], t.p + 16 * j, t.plane);
    // the sum of the rounded weights, which are multiplied
    for (int i = 0; kPlanes == 2 && i < 2; ++i) sum[i] = _mm512_sub_ps(sum[i], p[i]);
  }
  return _mm512_add_ps(sum[0], sum[1]);
}

template <bool kMasked, int kPlanes>
void softmax_column(const MatrixSoftmax& t) {
  const __m512 before = _mm512_load_ps(t.max), max = column_maximum<kMasked>(t, before);
  const __m512 nothing = _mm512_set1_ps(-HUGE_VALF);
  // Rows that have seen no key take exponents relative to 0.
  const __m512 base = _mm512_mask_mov_ps(max, _mm512_cmp_ps_mask(max, nothing, _CMP_EQ_OQ), _mm512_setzero_ps());
  __m512 sum = _mm512_load_ps(t.sum);
  if (_mm512_cmp_ps_mask(max, before, _CMP_NEQ_UQ) != 0) {
    const __m512 factor = Exponential(t.scale).of(_mm512_sub_ps(before, base));
    _mm512_store_ps(t.max, max);
    sum = _mm512_mul_ps(sum, factor);
    for (int64_t d = 0; d < t.o_dim; ++d) _mm512_store_ps(t.o + 16 * d, _mm512_mul_ps(_mm512_load_ps(t.o + 16 * d), factor));
  }
  _mm512_store_ps(t.sum, _mm512_add_ps(sum, column_exponentials<kMasked, kPlanes>(t, base)));
}

template <int kPlanes>
void softmax_planes(const MatrixSoftmax& t) {
  t.visible != nullptr ? softmax_column<true, kPlanes>(t) : softmax_column<false, kPlanes>(t);
}

void softmax_matrix(const MatrixSoftmax& t) {
  t.n_planes == 1 ? softmax_planes<1>(t) : t.n_planes == 2 ? softmax_planes<2>(t) : softmax_planes<3>(t);
}

void put_rows(const float* o_t, int64_t dims, const float* factor, int32_t n_rows, float* o) {
  const __m512 factors = _mm512_loadu_ps(factor);
  for (int64_t d = 0; d < dims; d += 16) {
    __m512i x[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m512 value = _mm512_load_ps(o_t + 16 * (d + i));
      x[i] = _mm512_castps_si512(_mm512_fmadd_ps(value, factors, _mm512_sub_ps(value, value)));
    }
    transpose_words(x);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r)
      if (r < n_rows) _mm512_storeu_ps(o + r * dims + d, _mm512_castsi512_ps(x[r]));
  }
}

void open_matrix() { open_tiles(); }
void close_matrix() { close_tiles(); }

inline constexpr MatrixKernels kMatrixKernels = {open_matrix,    close_matrix,     split_planes,     split_halves,
                                                 pack_queries,   transpose_values, transpose_halves, multiply_matrix,
                                                 softmax_matrix, put_rows};
inline constexpr const MatrixKernels* kMatrix = &kMatrixKernels;

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
