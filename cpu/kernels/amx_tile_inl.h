// SPDX-License-Identifier: MIT
// Intel AMX: its eight tile registers of 16 rows x 64 bytes, and the code that its kernels share.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/tile_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

inline constexpr int64_t kTarget = HWY_TARGET | kMatrixUnit;
inline constexpr int64_t kTileBytes = 1024, kTileFloats = 256;
inline constexpr int64_t kTileKeysAmx = 16, kTileRowsAmx = 4;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

alignas(64) inline constexpr uint8_t kNothing[64] = {};

HWY_INLINE void open_tiles() {
  static constexpr TileConfig kConfig;
  asm volatile("ldtilecfg %0" ::"m"(kConfig));
}
HWY_INLINE void close_tiles() { asm volatile("tilerelease"); }

#define TANDEM_TILE_LOAD(tile, base, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(base), "r"(stride) : "memory")
#define TANDEM_TILE_STORE(tile, base) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(base), "r"(int64_t{64}) : "memory")
// Zeros a tile by a load, because tilezero waits until earlier multiplications are done.
#define TANDEM_TILE_ZERO(tile) TANDEM_TILE_LOAD(tile, kNothing, int64_t{0})
#define TANDEM_TILE_DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
// Multiplies signed bytes and adds into 32 bits.
#define TANDEM_TILE_DOT_CODES(c, a, b) asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// Loads B of up to 4 rows into tiles 4 to 7. It stays there while the keys go by.
template <int kTiles>
HWY_INLINE void load_b(const uint32_t* tiles) {
  TANDEM_TILE_LOAD(4, tiles, int64_t{64});
  TANDEM_TILE_LOAD(5, tiles + kTileFloats, int64_t{64});
  if (kTiles > 2) TANDEM_TILE_LOAD(6, tiles + 2 * kTileFloats, int64_t{64});
  if (kTiles > 3) TANDEM_TILE_LOAD(7, tiles + 3 * kTileFloats, int64_t{64});
}

// Transposes 16 x 16 words.
HWY_INLINE void transpose_words(__m512i* x) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    x[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    x[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    x[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
    t[12 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88);
    x[8 + i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
    x[4 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88);
    x[12 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
  }
}

// Takes [a, b] in order; a gets its even elements, b its odd ones.
HWY_INLINE void split_even_odd(__m512& a, __m512& b) {
  const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512 even = _mm512_permutex2var_ps(a, evens, b);
  b = _mm512_permutex2var_ps(a, _mm512_add_epi32(evens, _mm512_set1_epi32(1)), b);
  a = even;
}

// True if the rows of 16 keys are `stride` bytes apart.
HWY_INLINE bool is_matrix(const Row* k, int64_t stride) {
  const __m512i step = _mm512_set1_epi64(stride), first = _mm512_set1_epi64(reinterpret_cast<int64_t>(k[0]));
  const __m512i iota = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i low = _mm512_add_epi64(first, _mm512_mullo_epi64(iota, step));
  const __m512i high = _mm512_add_epi64(low, _mm512_slli_epi64(step, 3));
  return _mm512_cmpneq_epi64_mask(low, _mm512_loadu_si512(k)) == 0 &&
         _mm512_cmpneq_epi64_mask(high, _mm512_loadu_si512(k + 8)) == 0;
}

// Turns the sums of 16 keys, a vector of columns 4 part + row for each, into 4 rows of 16 logits, kBlockKeys apart.
// Sums::of_key(j) returns the vector of key j. join() combines the four parts, finish() the sums of a row.
template <class Sums>
HWY_INLINE void sort_sums(const Sums& sums, int64_t n_rows, float* logits) {
  __m512 four[4];  // keys 4 i to 4 i + 3, 4 rows of each
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = sums.of_key(4 * i), b = sums.of_key(4 * i + 1), c = sums.of_key(4 * i + 2), d = sums.of_key(4 * i + 3);
    const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44), cd = _mm512_shuffle_f32x4(c, d, 0x44);
    const __m512 ab_last = _mm512_shuffle_f32x4(a, b, 0xee), cd_last = _mm512_shuffle_f32x4(c, d, 0xee);
    four[i] = sums.join(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd),
                        _mm512_shuffle_f32x4(ab_last, cd_last, 0x88), _mm512_shuffle_f32x4(ab_last, cd_last, 0xdd));
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
    if (r < n_rows) _mm512_storeu_ps(logits + r * kBlockKeys, sums.finish(row[r], r));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
