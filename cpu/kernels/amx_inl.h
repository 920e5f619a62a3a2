// SPDX-License-Identifier: MIT
// Logits of bf16 keys by Intel AMX: the matrix unit multiplies 16 keys x 32 dims with 32 dims x 16 columns while the vector
// units, which bound decode where a core has more than some 12 GB/s, have only the sums to sort.
//
// Columns are query rows, each three times: f32 = bf16 + bf16 + bf16 exactly (its 24 bits in 3 x 8), and products of two
// bf16 are exact in f32. So what is rounded is what the vector kernels round, in another order.
//
//   tile C [16 keys][16]      columns 4 part + row, of up to 4 query rows
//   tile A [16 keys][32 dims] rows of K as they lie
//   tile B [16 pairs of dims][16 columns][2]
//
// The sums of 16 keys are sorted while the next 16 are multiplied: stores of a tile are not forwarded to loads.
//
// 16 keys whose rows are at one distance are read where they lie, others (run ends, picked keys, the last few) are copied
// together first. An element of C depends on its key and its column alone: the bits are the same either way.
//
// The unit takes bf16 numbers below the normal ones, 2^-126, as 0: K's, and parts of q. Where K is infinite, a part of q
// that is 0 gives NaN.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/tile_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

inline constexpr int64_t kTileKeysAmx = 16, kTileDims = 32, kTileRowsAmx = 4;
inline constexpr int64_t kTileFloats = 256;  // of C; B has as many pairs

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

HWY_INLINE void open_tiles() {
  static constexpr TileConfig kConfig;
  asm volatile("ldtilecfg %0" ::"m"(kConfig));
}
HWY_INLINE void close_tiles() { asm volatile("tilerelease"); }

#define TANDEM_TILE_LOAD(tile, base, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(base), "r"(stride) : "memory")
#define TANDEM_TILE_STORE(tile, base) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(base), "r"(int64_t{64}) : "memory")
#define TANDEM_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define TANDEM_TILE_DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// The upper 16 bits of what is left of 16 numbers, which is a bf16 with 8 of their 24 bits. The first part tells what is not
// finite.
HWY_INLINE __m512i next_part(__m512* rest) {
  __m512i part = _mm512_and_si512(_mm512_castps_si512(*rest), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(*rest, *rest, _CMP_UNORD_Q);
  part = _mm512_mask_or_epi32(part, is_nan, part, _mm512_set1_epi32(0x00400000));
  const __m512 left = _mm512_sub_ps(*rest, _mm512_castsi512_ps(part));
  *rest = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(left, left, _CMP_ORD_Q), left);
  return part;
}

inline constexpr int64_t kTarget = HWY_TARGET | kMatrixUnit;

// 80 and 112 are no whole tiles, and beyond 128 B does not fit into the tiles beside A and C.
HWY_INLINE bool takes_tiles(const Layer& layer) {
  const int64_t dim = layer.k_head_dim;
  return layer.k_type == TANDEM_BF16 && layer.rope == nullptr && dim % kTileDims == 0 && dim <= kMaxTileDim;
}

// B tiles, for every 4 rows [dim / 32][16][16] pairs.
inline void pack_tiles(const float* q, int64_t n_rows, int64_t dim, float scale, uint32_t* tiles) {
  const int64_t n_tiles = (n_rows + kTileRowsAmx - 1) / kTileRowsAmx * (dim / kTileDims);
  memset(tiles, 0, static_cast<size_t>(n_tiles * kTileFloats) * sizeof(uint32_t));
  const __m512 factor = _mm512_set1_ps(scale);
  const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1)), lines = _mm512_slli_epi32(evens, 3);
  for (int64_t r = 0; r < n_rows; ++r) {
    uint32_t* of_row = tiles + r / kTileRowsAmx * (dim / kTileDims) * kTileFloats + r % kTileRowsAmx;
    for (int64_t i = 0; i < dim; i += kTileDims) {
      const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(q + r * dim + i), factor);
      const __m512 b = _mm512_mul_ps(_mm512_loadu_ps(q + r * dim + i + 16), factor);
      __m512 even = _mm512_permutex2var_ps(a, evens, b), odd = _mm512_permutex2var_ps(a, odds, b);
      for (int64_t part = 0; part < 3; ++part) {
        const __m512i low = _mm512_srli_epi32(next_part(&even), 16);
        _mm512_i32scatter_epi32(of_row + i / kTileDims * kTileFloats + part * kTileRowsAmx, lines,
                                _mm512_or_si512(low, next_part(&odd)), sizeof(uint32_t));
      }
    }
  }
}

// Rows of 16 keys: a matrix with this distance, or not.
HWY_INLINE bool is_matrix(const Row* k, int64_t stride) {
  const __m512i step = _mm512_set1_epi64(stride), first = _mm512_set1_epi64(reinterpret_cast<int64_t>(k[0]));
  const __m512i iota = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i low = _mm512_add_epi64(first, _mm512_mullo_epi64(iota, step));
  const __m512i high = _mm512_add_epi64(low, _mm512_slli_epi64(step, 3));
  return _mm512_cmpneq_epi64_mask(low, _mm512_loadu_si512(k)) == 0 &&
         _mm512_cmpneq_epi64_mask(high, _mm512_loadu_si512(k + 8)) == 0;
}

// C as stored to rows of logits: [16 keys][part, row] to 4 rows of 16, kBlockKeys apart.
HWY_INLINE void sort_sums(const float* sums, int64_t n_rows, float* logits) {
  __m512 four[4];  // keys 4 i to 4 i + 3, 4 rows of each
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const float* at = sums + 64 * i;
    const __m512 a = _mm512_load_ps(at), b = _mm512_load_ps(at + 16), c = _mm512_load_ps(at + 32),
                 d = _mm512_load_ps(at + 48);
    const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44), cd = _mm512_shuffle_f32x4(c, d, 0x44);
    const __m512 ab_last = _mm512_shuffle_f32x4(a, b, 0xee), cd_last = _mm512_shuffle_f32x4(c, d, 0xee);
    const __m512 first = _mm512_shuffle_f32x4(ab, cd, 0x88), second = _mm512_shuffle_f32x4(ab, cd, 0xdd);
    const __m512 third = _mm512_shuffle_f32x4(ab_last, cd_last, 0x88);
    four[i] = _mm512_add_ps(first, _mm512_add_ps(second, third));
  }
  const __m512i rows_01 = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i rows_23 = _mm512_add_epi32(rows_01, _mm512_set1_epi32(2));
  const __m512 a01 = _mm512_permutex2var_ps(four[0], rows_01, four[1]),
               b01 = _mm512_permutex2var_ps(four[2], rows_01, four[3]);
  const __m512 a23 = _mm512_permutex2var_ps(four[0], rows_23, four[1]),
               b23 = _mm512_permutex2var_ps(four[2], rows_23, four[3]);
  const __m512 row[4] = {_mm512_shuffle_f32x4(a01, b01, 0x44), _mm512_shuffle_f32x4(a01, b01, 0xee),
                         _mm512_shuffle_f32x4(a23, b23, 0x44), _mm512_shuffle_f32x4(a23, b23, 0xee)};
#pragma GCC unroll 4
  for (int64_t r = 0; r < 4; ++r)
    if (r < n_rows) _mm512_storeu_ps(logits + r * kBlockKeys, row[r]);
}

// The next lines of K: for 16 keys as many as they have.
HWY_INLINE void prefetch_rows(Prefetcher& ahead, int64_t n_lines) {
  if (ahead.group == nullptr) return;
  for (int64_t i = 0; i < n_lines; i += kStreams)
#pragma GCC unroll 4
    for (int64_t s = 0; s < kStreams; ++s) prefetch_next(ahead, s);
}

// C 0 += A B over all dims; even and odd steps have an A tile each.
template <int kSteps>
HWY_INLINE void multiply_tiles(const uint8_t* k, int64_t stride, Prefetcher& ahead, int64_t n_lines) {
  TANDEM_TILE_ZERO(0);
  TANDEM_TILE_LOAD(2, k, stride);
  TANDEM_TILE_DOT(0, 2, 4);
  prefetch_rows(ahead, n_lines);
  TANDEM_TILE_LOAD(3, k + 64, stride);
  TANDEM_TILE_DOT(0, 3, 5);
  prefetch_rows(ahead, n_lines);
  if (kSteps > 2) {
    TANDEM_TILE_LOAD(2, k + 128, stride);
    TANDEM_TILE_DOT(0, 2, 6);
    prefetch_rows(ahead, n_lines);
  }
  if (kSteps > 3) {
    TANDEM_TILE_LOAD(3, k + 192, stride);
    TANDEM_TILE_DOT(0, 3, 7);
    prefetch_rows(ahead, n_lines);
  }
}

// logits of n keys, a multiple of 16 that is one matrix, for up to 4 rows.
template <int kSteps>
inline void dot_matrix(const uint32_t* tiles, int64_t n_rows, const uint8_t* k, int64_t n, Prefetcher& ahead,
                       float* logits) {
  constexpr int64_t stride = kSteps * kTileDims * 2;
  alignas(64) float sums[2][kTileFloats];
  TANDEM_TILE_LOAD(4, tiles, int64_t{64});
  TANDEM_TILE_LOAD(5, tiles + kTileFloats, int64_t{64});
  if (kSteps > 2) TANDEM_TILE_LOAD(6, tiles + 2 * kTileFloats, int64_t{64});
  if (kSteps > 3) TANDEM_TILE_LOAD(7, tiles + 3 * kTileFloats, int64_t{64});
  for (int64_t j = 0; j < n; j += kTileKeysAmx) {
    multiply_tiles<kSteps>(k + j * stride, stride, ahead, kTileKeysAmx);
    TANDEM_TILE_STORE(0, sums[j / kTileKeysAmx % 2]);
    if (j > 0) sort_sums(sums[(j / kTileKeysAmx + 1) % 2], n_rows, logits + j - kTileKeysAmx);
  }
  sort_sums(sums[(n / kTileKeysAmx + 1) % 2], n_rows, logits + n - kTileKeysAmx);
}

// Keys from the first on that are one matrix, in whole sixteens.
HWY_INLINE int64_t matrix_keys(const Row* k, int64_t n, int64_t stride) {
  int64_t m = 0;
  while (m + kTileKeysAmx <= n && k[m] == k[0] + m * stride && is_matrix(k + m, stride)) m += kTileKeysAmx;
  return m;
}

template <int kSteps>
void dot_rows_by_tiles(const uint32_t* tiles, int64_t n_rows, const KeyList& keys, Prefetcher& ahead, float* logits) {
  Prefetcher none;
  for (int64_t r = 0; r < n_rows; r += kTileRowsAmx)
    dot_matrix<kSteps>(tiles + r / kTileRowsAmx * kSteps * kTileFloats, n_rows - r, keys.k[0], keys.n, r == 0 ? ahead : none,
                       logits + r * kBlockKeys);
}

// logits[r][j] = q[r] . k[j], q packed by pack_tiles(). Up to 15 entries past the last key are overwritten.
inline void dots_by_tiles(const uint32_t* tiles, int64_t n_rows, int64_t dim, const KeyList& keys, float* logits) {
  constexpr int64_t kInL1 = 64;  // keys, read again for every 4 rows
  alignas(64) uint8_t copied[kTileKeysAmx * kMaxTileDim * 2];
  Prefetcher ahead = keys.k_ahead;
  const int64_t row_bytes = 2 * dim;
  for (int64_t j = 0; j < keys.n;) {
    KeyList part = keys;
    part.k += j;
    part.n = matrix_keys(part.k, n_rows > kTileRowsAmx && keys.n - j > kInL1 ? kInL1 : keys.n - j, row_bytes);
    const Row first = copied;
    if (part.n == 0) {
      for (int64_t i = 0; i < kTileKeysAmx; ++i)
        memcpy(copied + i * row_bytes, part.k[j + i < keys.n ? i : 0], static_cast<size_t>(row_bytes));
      part.k = &first;
      part.n = kTileKeysAmx;
    }
    if (dim == 64)
      dot_rows_by_tiles<2>(tiles, n_rows, part, ahead, logits + j);
    else if (dim == 96)
      dot_rows_by_tiles<3>(tiles, n_rows, part, ahead, logits + j);
    else
      dot_rows_by_tiles<4>(tiles, n_rows, part, ahead, logits + j);
    j += part.n;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
