// SPDX-License-Identifier: MIT
// Logits of bf16 keys by Intel AMX. The matrix unit multiplies 16 keys x 32 dims with 32 dims x 16 columns. The vector units
// bound decode where a core has more than some 12 GB/s. Here they only have to sort the sums.
//
// Columns are query rows, each three times: f32 = bf16 + bf16 + bf16 exactly (its 24 bits in 3 x 8). Products of two bf16
// are exact in f32. So the roundings are those of the vector kernels, in another order.
//
//   tile C [16 keys][16]      columns 4 part + row, of up to 4 query rows
//   tile A [16 keys][32 dims] rows of K as stored
//   tile B [16 pairs of dims][16 columns][2]
//
// The sums of 16 keys are sorted while the next 16 are multiplied, because stores of a tile are not forwarded to loads.
//
// If the rows of 16 keys are equally far apart, the unit reads them in place. Other keys (run ends, picked keys, the last
// few) are copied together first. An element of C depends only on its key and its column, so the bits are the same either
// way.
//
// The unit treats subnormal bf16 numbers (below 2^-126) as 0, in K and in the parts of q. Where K is infinite, a part of q
// that is 0 gives NaN.
#pragma once

#include "cpu/kernels/amx_tile_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

inline constexpr int64_t kTileDims = 32;

// Returns the upper 16 bits of 16 numbers, a bf16 with 8 of their 24 bits, and leaves the remainder in *rest. Only the first
// part carries Inf and NaN.
HWY_INLINE __m512i next_part(__m512* rest) {
  __m512i part = _mm512_and_si512(_mm512_castps_si512(*rest), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(*rest, *rest, _CMP_UNORD_Q);
  part = _mm512_mask_or_epi32(part, is_nan, part, _mm512_set1_epi32(0x00400000));
  const __m512 left = _mm512_sub_ps(*rest, _mm512_castsi512_ps(part));
  *rest = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(left, left, _CMP_ORD_Q), left);
  return part;
}

// Packs q into B tiles: for every 4 rows [dim / 32][16][16] pairs.
inline void pack_bf16(const float* q, int64_t n_rows, int64_t dim, float scale, uint32_t* tiles) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t first = 0; first < n_rows; first += kTileRowsAmx) {
    for (int64_t i = 0; i < dim; i += kTileDims, tiles += kTileFloats) {
      __m512i columns[16] = {};
      for (int64_t r = 0; r < kTileRowsAmx && first + r < n_rows; ++r) {
        const float* row = q + (first + r) * dim + i;
        __m512 even = _mm512_mul_ps(_mm512_loadu_ps(row), factor), odd = _mm512_mul_ps(_mm512_loadu_ps(row + 16), factor);
        split_even_odd(even, odd);
        for (int64_t part = 0; part < 3; ++part) {
          const __m512i low = _mm512_srli_epi32(next_part(&even), 16);
          columns[part * kTileRowsAmx + r] = _mm512_or_si512(low, next_part(&odd));
        }
      }
      transpose_words(columns);
      for (int64_t pair = 0; pair < 16; ++pair) _mm512_store_si512(tiles + 16 * pair, columns[pair]);
    }
  }
}

struct Bf16Sums {
  const float* c;
  HWY_INLINE __m512 of_key(int64_t j) const { return _mm512_load_ps(c + 16 * j); }
  static HWY_INLINE __m512 join(__m512 first, __m512 second, __m512 third, __m512) {
    return _mm512_add_ps(first, _mm512_add_ps(second, third));
  }
  static HWY_INLINE __m512 finish(__m512 row, int64_t) { return row; }
};

// Prefetches a row of kRowBytes of each stream of the next K.
template <int64_t kRowBytes>
HWY_INLINE void prefetch_rows(Prefetcher& ahead) {
  if (ahead.group == nullptr) return;
#pragma GCC unroll 4
  for (int64_t s = 0; s < kStreams; ++s) {
    const Row row = ahead.group[ahead.row + s * ahead.apart];
    for (int64_t at = 0; at < kRowBytes; at += int64_t{kLine}) prefetch_line(row + at, ahead.to_l2);
  }
  next_row(ahead);
}

// C 0 = A B over all dims; even and odd steps have an A tile each.
template <int kSteps>
HWY_INLINE void multiply_tiles(const uint8_t* k, int64_t stride, Prefetcher& ahead) {
  constexpr int64_t kRowBytes = kSteps * kTileDims * 2;
  TANDEM_TILE_ZERO(0);
  TANDEM_TILE_LOAD(2, k, stride);
  TANDEM_TILE_DOT(0, 2, 4);
  prefetch_rows<kRowBytes>(ahead);
  TANDEM_TILE_LOAD(3, k + 64, stride);
  TANDEM_TILE_DOT(0, 3, 5);
  prefetch_rows<kRowBytes>(ahead);
  if (kSteps > 2) {
    TANDEM_TILE_LOAD(2, k + 128, stride);
    TANDEM_TILE_DOT(0, 2, 6);
    prefetch_rows<kRowBytes>(ahead);
  }
  if (kSteps > 3) {
    TANDEM_TILE_LOAD(3, k + 192, stride);
    TANDEM_TILE_DOT(0, 3, 7);
  }
  for (int i = kSteps < 4 ? kSteps : 3; i < 4; ++i) prefetch_rows<kRowBytes>(ahead);  // 4 rows of each stream for 16 keys
}

// Consecutive keys, a multiple of 16, whose rows are `stride` bytes apart.
struct KeyMatrix {
  const uint8_t* k;
  int64_t n, stride;
};

// Computes the logits of the matrix's keys for up to 4 rows.
template <int kSteps>
inline void dot_matrix(const uint32_t* tiles, int64_t n_rows, const KeyMatrix& matrix, Prefetcher& ahead, float* logits) {
  const auto [k, n, stride] = matrix;
  alignas(64) float sums[2][kTileFloats];
  load_b<kSteps>(tiles);
  for (int64_t j = 0; j < n; j += kTileKeysAmx) {
    multiply_tiles<kSteps>(k + j * stride, stride, ahead);
    TANDEM_TILE_STORE(0, sums[j / kTileKeysAmx % 2]);
    if (j > 0) sort_sums(Bf16Sums{sums[(j / kTileKeysAmx + 1) % 2]}, n_rows, logits + j - kTileKeysAmx);
  }
  sort_sums(Bf16Sums{sums[(n / kTileKeysAmx + 1) % 2]}, n_rows, logits + n - kTileKeysAmx);
}

// Returns how many keys, from the first on and in whole sixteens, form one matrix.
HWY_INLINE int64_t matrix_keys(const Row* k, int64_t n, int64_t stride) {
  int64_t m = 0;
  while (m + kTileKeysAmx <= n && k[m] == k[0] + m * stride && is_matrix(k + m, stride)) m += kTileKeysAmx;
  return m;
}

template <int kSteps>
void dot_rows_by_tiles(const uint32_t* tiles, int64_t n_rows, const KeyMatrix& matrix, Prefetcher& ahead, float* logits) {
  Prefetcher none;
  for (int64_t r = 0; r < n_rows; r += kTileRowsAmx)
    dot_matrix<kSteps>(tiles + r / kTileRowsAmx * kSteps * kTileFloats, n_rows - r, matrix, r == 0 ? ahead : none,
                       logits + r * kBlockKeys);
}

// Copies a row of whole cache lines.
HWY_INLINE void copy_row(const uint8_t* from, int64_t n_bytes, uint8_t* to) {
  for (int64_t at = 0; at < n_bytes; at += 64) _mm512_store_si512(to + at, _mm512_loadu_si512(from + at));
}

// Computes logits[r][j] = q[r] . k[j] with q packed by pack_bf16(). Overwrites up to 15 entries past the last key.
inline void dots_of_bf16(const uint32_t* tiles, int64_t n_rows, int64_t dim, const KeyList& keys, float* logits) {
  constexpr int64_t kInL1 = 64;  // keys that are read again for every 4 rows
  alignas(64) uint8_t copied[kTileKeysAmx * kMaxTileDim * 2];
  Prefetcher ahead = keys.k_ahead;
  const int64_t row_bytes = 2 * dim;
  for (int64_t j = 0; j < keys.n;) {
    const Row* k = keys.k + j;
    const int64_t n_left = keys.n - j;
    KeyMatrix matrix{k[0], 0, n_left > 1 ? k[1] - k[0] : row_bytes};
    matrix.n = matrix_keys(k, n_rows > kTileRowsAmx && n_left > kInL1 ? kInL1 : n_left, matrix.stride);
    if (matrix.n == 0) {
      for (int64_t i = 0; i < kTileKeysAmx; ++i) copy_row(k[i < n_left ? i : 0], row_bytes, copied + i * row_bytes);
      matrix = {copied, kTileKeysAmx, row_bytes};
    }
    if (dim == 64)
      dot_rows_by_tiles<2>(tiles, n_rows, matrix, ahead, logits + j);
    else if (dim == 96)
      dot_rows_by_tiles<3>(tiles, n_rows, matrix, ahead, logits + j);
    else
      dot_rows_by_tiles<4>(tiles, n_rows, matrix, ahead, logits + j);
    j += matrix.n;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
