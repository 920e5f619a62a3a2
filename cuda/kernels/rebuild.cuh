// SPDX-License-Identifier: MIT
// What comes before and after the products of rebuild(): hidden states normalised, and sums to rows of pages.
//
//   normalise   x [n_rows, dim], f16 or bf16  ->  norm(x), rounded to the weights' type; a block has a row
//   store       y [n_rows, n_heads, dim] f32  ->  + bias, rotated, rounded to the storage type, into pages; a warp has some
//               rows of a head that follow each other, and rounds them as append() does
//
// Both run beside products, which leave them few multiprocessors: what counts is how much each has on its way from memory.
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/kernels/rotate.cuh"

namespace tandem::cuda {

inline constexpr int kNormWarps = 8, kStoreWarps = 8;
inline constexpr int kStoreRows = 4;  // at a time, of a warp; pages have a multiple of it

struct NormCall {
  const void* x;
  void* to;
  const float *weight, *bias;  // or null
  int32_t dim, x_type, to_type;
  int32_t norm;
  float eps;
};

struct StoreCall {
  const float* y;
  const float* bias;  // [n_heads * dim] or null
  int64_t n_rows;
  int32_t n_heads, dim, type;
  int32_t four_bytes;  // of four numbers' codes
  std::byte *codes, *scales;
  int64_t head_stride[2], row_bytes[2];  // of codes, of scales
  int64_t page_bytes;
  int32_t page_len;
  Rotation rotation;
  const int64_t* page_positions;  // where rows are rotated
};
struct StoreCalls {
  StoreCall of[2];  // K, V
};

__device__ inline float sum_of_block(float x, float* room) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  __syncthreads();  // what was there has been read
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormWarps; ++i) sum += room[i];
  return sum;
}

// What a thread keeps of its row as it is there, of 16 bits a number, so that it reads it once: rows of up to 8,192 numbers.
inline constexpr int kHeldFours = 8;
using HeldRow = uint2[kHeldFours];

__device__ inline int first_held(int j) { return (j * kNormWarps * 32 + static_cast<int>(threadIdx.x)) * kLaneNumbers; }
__device__ inline uint2 load_norm_four(const NormCall& call, int first) {
  const uint4 four = load_four(call.x, call.x_type, int64_t{blockIdx.x} * call.dim + first);
  return make_uint2(four.x, four.y);
}

// f(first, x): of four numbers, all of a row's.
template <class F>
__device__ inline void for_fours(const NormCall& call, const HeldRow& held, F f) {
  const auto give = [&](int first, uint2 four) {
    float x[kLaneNumbers];
    widen_four(call.x_type, make_uint4(four.x, four.y, 0, 0), x);
    f(first, x);
  };
#pragma unroll
  for (int j = 0; j < kHeldFours; ++j)
    if (first_held(j) < call.dim) give(first_held(j), held[j]);
  for (int j = kHeldFours; first_held(j) < call.dim; ++j) give(first_held(j), load_norm_four(call, first_held(j)));
}

__global__ void __launch_bounds__(32 * kNormWarps) norm_kernel(const __grid_constant__ NormCall call) {
  __shared__ float room[kNormWarps];
  begin_behind();
  HeldRow held;
#pragma unroll
  for (int j = 0; j < kHeldFours; ++j)
    if (first_held(j) < call.dim) held[j] = load_norm_four(call, first_held(j));
  float mean = 0.0f, scale = 1.0f;
  if (call.norm == TANDEM_NORM_LAYER) {
    float sum = 0.0f;
    for_fours(call, held, [&](int, const float(&x)[kLaneNumbers]) { sum += (x[0] + x[1]) + (x[2] + x[3]); });
    mean = sum_of_block(sum, room) / static_cast<float>(call.dim);
  }
  if (call.norm != TANDEM_NORM_NONE) {
    float sum = 0.0f;
    for_fours(call, held, [&](int, const float(&x)[kLaneNumbers]) {
#pragma unroll
      for (int i = 0; i < kLaneNumbers; ++i) sum += (x[i] - mean) * (x[i] - mean);
    });
    scale = 1.0f / sqrtf(sum_of_block(sum, room) / static_cast<float>(call.dim) + call.eps);
  }
  for_fours(call, held, [&](int first, float(&x)[kLaneNumbers]) {
    float weight[kLaneNumbers] = {1.0f, 1.0f, 1.0f, 1.0f}, bias[kLaneNumbers] = {};
    if (call.weight != nullptr) widen_four(TANDEM_F32, load_four(call.weight, TANDEM_F32, first), weight);
    if (call.bias != nullptr) widen_four(TANDEM_F32, load_four(call.bias, TANDEM_F32, first), bias);
#pragma unroll
    for (int i = 0; i < kLaneNumbers; ++i) x[i] = (x[i] - mean) * scale * weight[i] + bias[i];
    store_four(call.to, call.to_type, int64_t{blockIdx.x} * call.dim + first, x);
  });
}

// A lane's numbers of a head's vector.
using RowNumbers = float[kFours][kLaneNumbers];

__device__ inline void load_row(const float* from, int dim, RowNumbers& x) {
#pragma unroll
  for (int j = 0; j < kFours; ++j)
    if (first_of_four(j) < dim) widen_four(TANDEM_F32, load_four(from, TANDEM_F32, first_of_four(j)), x[j]);
}

__device__ inline void store_row(const StoreCall& call, int head, int64_t row, const RowNumbers& x) {
  const int64_t page = row / call.page_len * call.page_bytes, slot = row % call.page_len;
  std::byte* const codes = call.codes + page + head * call.head_stride[0] + slot * call.row_bytes[0];
  std::byte* const scales = call.scales + page + head * call.head_stride[1] + slot * call.row_bytes[1];
#pragma unroll
  for (int j = 0; j < kFours; ++j) {
    const StoredFour stored = round_four(call.type, x[j]);
    const int four = first_of_four(j) / kLaneNumbers;
    if (first_of_four(j) >= call.dim) continue;
    store_codes(codes + four * call.four_bytes, stored.codes, call.four_bytes);
    if (call.row_bytes[1] > 0 && threadIdx.x % 8 == 0)
      store_codes(scales + four / 8 * 2, make_uint4(stored.scale, 0, 0, 0), 2);
  }
}

__global__ void __launch_bounds__(32 * kStoreWarps) store_kernel(const __grid_constant__ StoreCalls calls) {
  __shared__ float rooms[kStoreWarps][kFours * kWarpNumbers];
  begin_behind();
  const StoreCall& call = calls.of[blockIdx.y];
  const int64_t n = (call.n_rows + kStoreRows - 1) / kStoreRows * call.n_heads, step = int64_t{gridDim.x} * kStoreWarps;
  for (int64_t at = int64_t{blockIdx.x} * kStoreWarps + threadIdx.x / 32; at < n; at += step) {
    const int64_t first_row = at / call.n_heads * kStoreRows;
    const auto head = static_cast<int>(at % call.n_heads);
    const auto n_rows = static_cast<int>(min(call.n_rows - first_row, int64_t{kStoreRows}));
    RowNumbers rows[kStoreRows] = {}, bias = {};
#pragma unroll
    for (int r = 0; r < kStoreRows; ++r)
      if (r < n_rows) load_row(call.y + ((first_row + r) * call.n_heads + head) * call.dim, call.dim, rows[r]);
    if (call.bias != nullptr) load_row(call.bias + head * call.dim, call.dim, bias);
#pragma unroll
    for (int r = 0; r < kStoreRows; ++r) {
      if (r >= n_rows) break;
      const int64_t row = first_row + r;
      RowNumbers& x = rows[r];
#pragma unroll
      for (int j = 0; j < kFours; ++j)
#pragma unroll
        for (int i = 0; i < kLaneNumbers; ++i) x[j][i] += bias[j][i];
      if (call.rotation.n_pairs > 0)
        rotate_row(call.rotation, call.page_positions[row / call.page_len] + row % call.page_len, x,
                   rooms[threadIdx.x / 32]);
      store_row(call, head, row, x);
    }
  }
}

}  // namespace tandem::cuda
