// SPDX-License-Identifier: MIT
// SIMD parts of append and prefill: rotation, products of a tile, softmax of a tile of logits.
//
// Compiled once per instruction set; softmax_tile_kernels() returns the table to use. Only plain C types, so no code
// compiled for one instruction set can leak into code that runs on every processor.
#pragma once

#include <stdint.h>

namespace tandem::cpu {

// Rows of logits that see the same columns, one step of the online softmax:
//   m' = max(m, max_j s_j), p_j = exp(s_j - m'), sum' = sum exp(m - m') + sum_j p_j, o' = o exp(m - m')
// A visible product that is NaN or Inf makes max, sum and p of its row NaN, whatever its sign. A hidden one has p = 0 and no
// influence. A row that has seen no column keeps max = -inf and sum = 0.
struct SoftmaxTile {
  static constexpr int64_t kColumnStep = 128;

  float* s = nullptr;  // [n_rows, stride_s] in: products; out: p as f32, or as bf16 from the start of each row
  int64_t stride_s = 0;
  int32_t n_rows = 0;
  int32_t n_columns = 0;              // a multiple of kColumnStep
  const uint32_t* visible = nullptr;  // [n_columns], ~0 or 0; null: all are visible
  float scale = 1.0f;
  bool p_is_bf16 = false;    // rounded to nearest; sum adds the unrounded values
  float* row_max = nullptr;  // [n_rows]
  float* row_sum = nullptr;  // [n_rows]
  float* o = nullptr;        // [n_rows, o_dim]
  int64_t o_dim = 0;
};

// Keys to rotate in place.
struct RotateRows {
  float* rows = nullptr;  // [n_rows, stride]
  int64_t stride = 0;
  int64_t n_rows = 0;
  const float* high = nullptr;  // [2][n_pairs] cos and sin of the upper digits of the position, times any factor
  const float* low = nullptr;   // [n_rows][2][n_pairs] cos and sin of the lowest digit: consecutive positions
  int32_t n_pairs = 0;
  bool interleaved = false;
};

// c (+)= a b. A word is an f32, or two bf16 that follow each other in k; sums are f32.
inline constexpr int64_t kPanelColumns = 64;
struct Product {
  const void* a = nullptr;  // [m, k] words
  int64_t stride_a = 0;     // words between rows
  const void* b = nullptr;  // panels of [k, kPanelColumns] words; rows of n words are panels too, kPanelColumns apart
  int64_t stride_b = 0;     // words between rows of a panel
  int64_t panel_stride = 0;
  float* c = nullptr;  // [m, n]
  int64_t stride_c = 0;
  int64_t m = 0, n = 0, k = 0;  // n: a multiple of 16
  bool accumulate = false;
};

// Packs rows into panels; a row becomes a column of b.
struct PackColumns {
  const void* rows = nullptr;       // [n_rows, n_words]
  int64_t n_rows = 0, n_words = 0;  // multiples of kPanelColumns and of 4
  void* panels = nullptr;           // [n_rows / kPanelColumns, n_words, kPanelColumns]
};

// Packs rows of bf16 into rows of words; 2 rows of b become one.
struct PackPairs {
  const uint16_t* rows = nullptr;  // [n_rows, stride]
  int64_t stride = 0;
  int64_t n_rows = 0, n_columns = 0;  // multiples of 2 and of 16
  uint32_t* words = nullptr;          // [n_rows / 2, n_columns]
};

struct SoftmaxTileKernels {
  int64_t target;  // HWY_AVX2, ...: the target of the compilation
  void (*rotate)(const RotateRows& job);
  // Sets s to soft_cap * tanh(s * scale / soft_cap), or to s * scale if soft_cap is 0. Inf becomes NaN under a cap.
  void (*cap_logits)(float* s, int64_t n, float scale, float soft_cap);
  void (*softmax)(const SoftmaxTile& tile);
  // Returns true if any of n 32-bit words holds an f32 (or, packed, one of two bf16) that is Inf or NaN.
  bool (*has_nonfinite)(const void* words, int64_t n, bool packed_bf16);
  void (*multiply)(const Product& product);
  void (*multiply_bf16)(const Product& product);  // null: not compiled for this target; callable only if has_bf16_products()
  void (*pack_columns)(const PackColumns& job);
  void (*pack_pairs)(const PackPairs& job);
  void (*exp)(const float* x, float* y, int64_t n);  // for x <= 0; relative error below 2^-22; 0 below e^-87
};

// Returns the kernels of this processor's best instruction set that is not above `isa` ("avx2", ...; null: no limit).
// Returns null if the name is unknown or this processor does not have it.
const SoftmaxTileKernels* softmax_tile_kernels(const char* isa);

// True if this processor multiplies bf16 faster than f32 with these kernels.
bool has_bf16_products(const SoftmaxTileKernels& kernels);

}  // namespace tandem::cpu
