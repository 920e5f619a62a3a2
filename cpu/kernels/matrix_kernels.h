// SPDX-License-Identifier: MIT
// Flash attention of many query rows on a matrix unit (Intel AMX), as plain function pointers. cpu/matrix_block.cc combines
// them.
//
// The unit multiplies tiles of 16 rows x 32 bf16 (A) with tiles of 32 x 16 (B, pairs of its rows side by side) into 16 x 16
// f32 (C). The layout makes a query row a column (one vector lane) from the logits to the output:
//
//   s^T [keys][16]  = K q^T       A: rows of K as stored in the cache      B: q, packed once for all keys
//   p^T [keys/2][16][2]           softmax: nothing crosses lanes, and two keys side by side are B's pairs
//   o^T [dims][16] += V^T p^T     A: V, transposed once for all rows        B: p
//
// A column group is 16 query rows. A number with more than the 8 bits of a bf16 is a sum of up to three bf16, its planes. An
// f16 has exactly two. A and B planes (i, j) with i + j <= 2 are multiplied; the rest is below 2^-24 of a product.
#pragma once

#include <stdint.h>

namespace tandem::cpu {

inline constexpr int32_t kMatrixRows = 16;   // rows of a tile, and query rows of a column group
inline constexpr int32_t kMatrixDepth = 32;  // bf16 that one multiplication sums over
inline constexpr int32_t kMatrixKeys = 256;  // keys whose logits are kept at a time
inline constexpr int32_t kMaxPlanes = 3;
inline constexpr int64_t kMatrixTileBytes = 1024;

// Offsets of a pair of planes, in bytes from the first planes.
struct PlanePair {
  int64_t a, b;
};

// C [n_blocks of 16 rows][16 columns] of 1 or 2 column groups: sums over all pairs of planes and n_steps steps of 32.
struct MatrixProduct {
  const uint8_t* const* a = nullptr;  // [n_blocks] 16 rows each; steps are a_step apart: 64 bytes (in a row) or a tile
  int64_t a_stride = 0;               // bytes between rows
  int64_t a_step = 0;                 // bytes between steps
  int32_t n_blocks = 0;
  int32_t n_groups = 0;
  const uint8_t* b = nullptr;  // tiles, one after another for each step
  int64_t b_group = 0;         // bytes between column groups
  int32_t n_steps = 0;
  int32_t n_pairs = 0;
  PlanePair pairs[6] = {};
  float* c = nullptr;  // block i of group g at c + g * c_group + i * 256
  int64_t c_group = 0;
  bool accumulate = false;  // adds to the contents of C
};

// One step of the online softmax: a column group against up to kMatrixKeys keys. As in SoftmaxTile (softmax_tile.h), a
// visible product that is not finite makes its row NaN, and a hidden one weighs 0.
struct MatrixSoftmax {
  const float* s = nullptr;           // [n_keys][16] products
  const uint16_t* visible = nullptr;  // [n_keys] a bit for each row; null: all are visible
  int32_t n_keys = 0;                 // a multiple of 32
  float scale = 1.0f;                 // above 0
  float* max = nullptr;               // [16] largest product, before scale
  float* sum = nullptr;               // [16]
  float* o = nullptr;                 // [o_dim][16]
  int64_t o_dim = 0;
  uint16_t* p = nullptr;  // [n_planes][n_keys / 2][16][2]; with one or two planes rounded to nearest
  int64_t plane = 0;      // elements between planes
  int32_t n_planes = 1;
  const uint8_t* const* ahead = nullptr;  // [n_ahead] memory to prefetch meanwhile, ahead_bytes each; null: none
  int32_t n_ahead = 0;
  int64_t ahead_bytes = 0;
};

struct MatrixKernels {
  // Called before and after all multiplications of a thread.
  void (*open)();
  void (*close)();
  // Splits n f32 into planes of bf16, `plane` elements apart: bits from the top, eight at a time. Only the first plane
  // carries Inf and NaN.
  void (*split)(const float* from, int64_t n, int32_t n_planes, uint16_t* to, int64_t plane);
  // Splits n f16, a multiple of 32, into two planes.
  void (*split_halves)(const uint8_t* from, int64_t n, uint16_t* to, int64_t plane);
  // Packs 16 rows of a plane [16, stride] as B: [n_steps][16][16][2]. Dims beyond `dims` are 0.
  void (*pack_queries)(const uint16_t* rows, int64_t stride, int64_t dims, uint16_t* tiles);
  // Transposes n_keys rows, a multiple of 32, of dims bf16, a multiple of 16, to A: V^T in tiles [dims / 16][kMatrixKeys /
  // 32][16][32].
  void (*transpose_values)(const uint8_t* const* rows, int32_t n_keys, int32_t dims, uint16_t* tiles);
  // As transpose_values, for f16, into two planes.
  void (*transpose_halves)(const uint8_t* const* rows, int32_t n_keys, int32_t dims, uint16_t* tiles, int64_t plane);
  void (*multiply)(const MatrixProduct& product);
  void (*softmax)(const MatrixSoftmax& softmax);
  // Sets o[r][d] = o_t[d][r] * factor[r], and NaN where o_t is not finite, for n_rows <= 16 rows.
  void (*put_rows)(const float* o_t, int64_t dims, const float* factor, int32_t n_rows, float* o);
};

}  // namespace tandem::cpu
