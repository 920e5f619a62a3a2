// SPDX-License-Identifier: MIT
// Logits of q8_0 and q4_0 keys by Intel AMX, in integers.
//
// q is rounded to 2^-30 of its row's largest number and cut into four signed bytes. So the 16 columns of B are the four
// parts of up to 4 query rows. Sums over a group of 32 dims are exact. They are converted to f32, multiplied by the key's
// scale and added up. Rounding q costs a logit at most 2^-31 max |q| sum |k|. That is less than f32 sums lose, unless keys
// are 0 exactly where q is thousands of times larger than elsewhere.
//
//   tile A [16 keys][64]       codes of two groups
//   tile B [16 quads of dims][16 columns 4 part + row][4]      of one group; the other half is zero
//   tile C [16 keys][16]       of one group
//
// A row of q that is not finite gives NaN.
#pragma once

#include "cpu/kernels/amx_tile_inl.h"
#include "cpu/kernels/convert_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

inline constexpr int64_t kCodeGroup = 32;

// Returns 16 times the codes of q4_0. Takes codes plus 8 in the upper halves of the bytes.
HWY_INLINE __m512i signed_nibbles(__m512i codes) {
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80)), upper = _mm512_set1_epi8(static_cast<char>(0xf0));
  return _mm512_ternarylogic_epi32(codes, sign, upper, 0x28);  // (codes ^ sign) & upper
}

// Cuts 16 numbers below 2^31 into four signed bytes each, x = sum of byte_i 256^i. The last bytes come first in every 128
// bits.
HWY_INLINE __m512i four_bytes(__m512i x) {
  const __m512i low = _mm512_set1_epi32(0x00808080);
  const __m512i by_part = _mm512_broadcast_i32x4(_mm_setr_epi8(3, 7, 11, 15, 2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12));
  return _mm512_shuffle_epi8(_mm512_xor_si512(_mm512_add_epi32(x, low), low), by_part);
}

HWY_INLINE float power_of_2(int exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// Bytes of a row as they stand in A. q8_0: as stored. q4_0: the even elements of every group, then its odd ones.
struct CodesQ8 {
  static constexpr bool kUnpacks = false, kInBlocks = false;
  static constexpr float kUnit = 1.0f;
  static constexpr int64_t kBytesPer64 = 64;
  static HWY_INLINE void sort_dims(__m512&, __m512&) {}
  static HWY_INLINE void unpack(Row k, int64_t dim, uint8_t* to) { memcpy(to, k, static_cast<size_t>(dim)); }
};
struct CodesQ4 {
  static constexpr bool kUnpacks = true, kInBlocks = false;
  static constexpr float kUnit = 16.0f;  // signed_nibbles() gives 16 times the codes
  static constexpr int64_t kBytesPer64 = 32;
  static HWY_INLINE void sort_dims(__m512& a, __m512& b) { split_even_odd(a, b); }
  static HWY_INLINE void unpack(Row k, int64_t dim, uint8_t* to) {
    const __m512i twice = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);
    const __m512i shift = _mm512_broadcast_i64x4(_mm256_setr_epi64x(0x0004000400040004, 0x0004000400040004, 0, 0));
    for (int64_t at = 0; at < dim; at += 64) {
      const __m512i raw = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(k + at / 2)));
      _mm512_store_si512(to + at, signed_nibbles(_mm512_sllv_epi16(_mm512_permutexvar_epi64(twice, raw), shift)));
    }
  }
};

// The same for ggml's blocks (a scale, then its codes), in the order of the dims.
struct CodesQ8Blocks {
  static constexpr bool kUnpacks = true, kInBlocks = true;
  static constexpr int64_t kBlockBytes = StoredQ8_0Blocks::kBlockBytes;
  static constexpr float kUnit = 1.0f;
  static constexpr int64_t kBytesPer64 = 2 * StoredQ8_0Blocks::kBlockBytes;
  static HWY_INLINE void sort_dims(__m512&, __m512&) {}
  static HWY_INLINE void unpack(Row k, int64_t dim, uint8_t* to) {
    for (int64_t at = 0; at < dim; at += kCodeGroup, k += StoredQ8_0Blocks::kBlockBytes)
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + at),
                         _mm256_loadu_si256(reinterpret_cast<const __m256i*>(k + sizeof(uint16_t))));
  }
};
struct CodesQ4Blocks {
  static constexpr bool kUnpacks = true, kInBlocks = true;
  static constexpr int64_t kBlockBytes = BlockNibbles::kBlockBytes;
  static constexpr float kUnit = 16.0f;
  static constexpr int64_t kBytesPer64 = 2 * BlockNibbles::kBlockBytes;
  static HWY_INLINE void sort_dims(__m512&, __m512&) {}
  static HWY_INLINE void unpack(Row k, int64_t dim, uint8_t* to) {
    const auto codes = [](Row block)
                           HWY_ATTR { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + sizeof(uint16_t))); };
    for (int64_t at = 0; at < dim; at += 2 * kCodeGroup, k += kBytesPer64) {
      __m512i raw = _mm512_castsi128_si512(codes(k));
      const __m128i next = codes(k + BlockNibbles::kBlockBytes);
      raw = _mm512_inserti32x4(raw, codes(k), 1);
      raw = _mm512_inserti32x4(raw, next, 2);
      raw = _mm512_inserti32x4(raw, next, 3);
      constexpr int64_t kNibble = 0x0004000400040004;  // in every word
      const __m512i shift = _mm512_setr_epi64(kNibble, kNibble, 0, 0, kNibble, kNibble, 0, 0);
      _mm512_store_si512(to + at, signed_nibbles(_mm512_sllv_epi16(raw, shift)));
    }
  }
};

// Packs q into B: for every 4 rows [dim / 32][16][16][4]. tile_scales: the factor for the sums of each row.
template <class Codes>
inline void pack_codes(const float* q, int64_t n_rows, int64_t dim, float scale, uint32_t* tiles, float* tile_scales) {
  const int64_t n_groups = dim / kCodeGroup, n_fours = (n_rows + kTileRowsAmx - 1) / kTileRowsAmx;
  memset(tiles, 0, static_cast<size_t>(n_fours * n_groups * kTileBytes));
  const __m512 factor = _mm512_set1_ps(scale);
  const __m512i columns = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
  for (int64_t r = 0; r < n_rows; ++r) {
    const float* row = q + r * dim;
    __m512i most = _mm512_set1_epi32(0x12800000);  // 2^-90, as bits: infinity and NaN are above everything
    for (int64_t i = 0; i < dim; i += 16)
      most = _mm512_max_epi32(most, _mm512_castps_si512(_mm512_abs_ps(_mm512_mul_ps(_mm512_loadu_ps(row + i), factor))));
    const int exponent = _mm512_reduce_max_epi32(most) >> 23;
    const __m512 unit = _mm512_castsi512_ps(_mm512_set1_epi32((2 * 127 + 29 - exponent) << 23));
    tile_scales[r] = exponent == 255 ? NAN : power_of_2(exponent - 127 - 5) / Codes::kUnit;  // for the first byte
    uint32_t* to = tiles + r / kTileRowsAmx * n_groups * kTileFloats + r % kTileRowsAmx;
    for (int64_t i = 0; i < dim; i += kCodeGroup, to += kTileFloats) {
      __m512 a = _mm512_mul_ps(_mm512_loadu_ps(row + i), factor), b = _mm512_mul_ps(_mm512_loadu_ps(row + i + 16), factor);
      Codes::sort_dims(a, b);
      uint32_t* half = to + i % 64 / 4 * 16;
      _mm512_i32scatter_epi32(half, columns, four_bytes(_mm512_cvtps_epi32(_mm512_mul_ps(a, unit))), sizeof(uint32_t));
      _mm512_i32scatter_epi32(half + 64, columns, four_bytes(_mm512_cvtps_epi32(_mm512_mul_ps(b, unit))), sizeof(uint32_t));
    }
  }
}

// Reads C of 16 keys for each group and applies the scales of the keys and of the rows. With every key it prefetches a row
// of the next K, the streams in turn. Prefetches in bursts would wait for one another.
template <int64_t kGroups, int64_t kRowBytes>
struct CodeSums {
  const uint8_t* c;
  const float* scales;
  const float* row_scales;
  const Row* ahead;  // of stream 0; null: nothing to prefetch
  int64_t apart;

  HWY_INLINE __m512 of_key(int64_t j) const {
    __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int64_t g = 0; g < kGroups; ++g) {
      const __m512 whole = _mm512_cvtepi32_ps(_mm512_load_si512(c + g * kTileBytes + j * 64));
      sum = _mm512_fmadd_ps(whole, _mm512_set1_ps(scales[j * kGroups + g]), sum);
    }
    if (ahead != nullptr) {
      const Row row = ahead[j / kStreams + j % kStreams * apart];
      for (int64_t at = 0; at < kRowBytes; at += int64_t{kLine}) prefetch_line(row + at);
    }
    return sum;
  }
  static HWY_INLINE __m512 join(__m512 first, __m512 second, __m512 third, __m512 fourth) {
    const __m512 byte = _mm512_set1_ps(0x1p-8f);
    return _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_fmadd_ps(fourth, byte, third), byte, second), byte, first);
  }
  HWY_INLINE __m512 finish(__m512 row, int64_t r) const { return _mm512_mul_ps(row, _mm512_set1_ps(row_scales[r])); }
};

// Computes C of two groups (64 dims).
template <int kChunk>
HWY_INLINE void multiply_codes(const uint8_t* k, int64_t stride, uint8_t* c) {
  TANDEM_TILE_ZERO(0);
  TANDEM_TILE_ZERO(1);
  if (kChunk == 0) {
    TANDEM_TILE_LOAD(2, k, stride);
    TANDEM_TILE_DOT_CODES(0, 2, 4);
    TANDEM_TILE_DOT_CODES(1, 2, 5);
  } else {
    TANDEM_TILE_LOAD(3, k, stride);
    TANDEM_TILE_DOT_CODES(0, 3, 6);
    TANDEM_TILE_DOT_CODES(1, 3, 7);
  }
  TANDEM_TILE_STORE(0, c);
  TANDEM_TILE_STORE(1, c + kTileBytes);
}

static_assert(kPageBytes / kMaxTileDim >= kTileKeysAmx / kStreams && kMaxAhead / kStreams >= kTileKeysAmx / kStreams,
              "16 keys end no group of rows to prefetch");

// Computes the logits of n keys for up to 4 rows. Overwrites up to 15 entries past the last key.
template <class Codes, int kChunks>
void dot_codes(const uint32_t* tiles, int64_t n_rows, const float* row_scales, const KeyList& keys, Prefetcher& ahead,
               float* logits) {
  constexpr int64_t dim = int64_t{kChunks} * 64, n_groups = int64_t{kChunks} * 2, stride = dim;
  alignas(64) uint8_t codes[2][kTileKeysAmx * dim];
  alignas(64) uint8_t sums[2][n_groups * kTileBytes];
  // Gathers the scales between the codes of 16 keys while these and the 16 keys before are multiplied and the keys before
  // those are sorted.
  constexpr int64_t kPrepared = 4;
  alignas(64) float scales[Codes::kInBlocks ? kPrepared : 1][kTileKeysAmx * n_groups];
  load_b<2 * kChunks>(tiles);
  const auto finish = [&](int64_t j) HWY_ATTR {
    const CodeSums<n_groups, kChunks * Codes::kBytesPer64> of{
        sums[j / kTileKeysAmx % 2], Codes::kInBlocks ? scales[j / kTileKeysAmx % kPrepared] : keys.k_scales + j * n_groups,
        row_scales, ahead.group == nullptr ? nullptr : ahead.group + ahead.row, ahead.apart};
    sort_sums(of, n_rows, logits + j);
    for (int64_t i = 0; i < kTileKeysAmx / kStreams && ahead.group != nullptr; ++i) next_row(ahead);
  };
  // Unpacks or copies 16 keys ahead, because stores are not forwarded to loads of a tile.
  const auto prepare = [&](int64_t j) HWY_ATTR -> const uint8_t* {
    if (!Codes::kUnpacks && j + kTileKeysAmx <= keys.n && is_matrix(keys.k + j, stride)) return keys.k[j];
    uint8_t* to = codes[j / kTileKeysAmx % 2];
    if constexpr (Codes::kInBlocks) {
      uint16_t f16[kTileKeysAmx * n_groups];
      for (int64_t i = 0; i < kTileKeysAmx; ++i)
        copy_block_scales(keys.k[j + i < keys.n ? j + i : j], Codes::kBlockBytes, n_groups, f16 + i * n_groups);
      widen_scales(f16, kTileKeysAmx * n_groups, scales[j / kTileKeysAmx % kPrepared]);
    }
    for (int64_t i = 0; i < kTileKeysAmx; ++i) Codes::unpack(keys.k[j + i < keys.n ? j + i : j], dim, to + i * dim);
    return to;
  };
  const uint8_t* k = prepare(0);
  for (int64_t j = 0; j < keys.n; j += kTileKeysAmx) {
    const uint8_t* next = j + kTileKeysAmx < keys.n ? prepare(j + kTileKeysAmx) : nullptr;
    uint8_t* c = sums[j / kTileKeysAmx % 2];
    multiply_codes<0>(k, stride, c);
    if (kChunks > 1) multiply_codes<1>(k + 64, stride, c + 2 * kTileBytes);
    if (j > 0) finish(j - kTileKeysAmx);
    k = next;
  }
  finish((keys.n - 1) / kTileKeysAmx * kTileKeysAmx);
}

// Computes logits[r][j] = q[r] . k[j] with q packed by pack_codes().
template <class Codes>
void dots_of_codes(const SpanScratch& s, int64_t n_rows, int64_t dim, const KeyList& keys, float* logits) {
  constexpr int64_t kInL1 = 128;  // keys that are read again for every 4 rows
  Prefetcher ahead = keys.k_ahead, none;
  for (int64_t j = 0; j < keys.n; j += kInL1) {
    KeyList part = keys;
    part.k += j;
    part.k_scales += j * keys.n_k_scales;
    part.n = keys.n - j < kInL1 ? keys.n - j : kInL1;
    for (int64_t r = 0; r < n_rows; r += kTileRowsAmx) {
      const uint32_t* tiles = s.tiles + r / kTileRowsAmx * (dim / kCodeGroup) * kTileFloats;
      float* to = logits + r * kBlockKeys + j;
      if (dim == 64)
        dot_codes<Codes, 1>(tiles, n_rows - r, s.tile_scales + r, part, r == 0 ? ahead : none, to);
      else
        dot_codes<Codes, 2>(tiles, n_rows - r, s.tile_scales + r, part, r == 0 ? ahead : none, to);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
