// SPDX-License-Identifier: MIT
// What comes before and after the products of rebuild(): hidden states normalised, and sums to rows of pages.
//
//   normalise   x [n_rows, dim], f16 or bf16  ->  norm(x), rounded to the weights' type; a block has a row
//   store       y [n_rows, n_heads, dim] f32  ->  + bias, rotated, rounded to the storage type, into pages; a warp has a
//               head's row, and rounds it as append() does
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/kernels/rotate.cuh"

namespace tandem::cuda {

inline constexpr int kNormWarps = 8, kStoreWarps = 8;

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

// What a thread keeps of its row, so that it reads it once: rows of up to 8,192 numbers.
inline constexpr int kHeldFours = 8;
using HeldRow = float[kHeldFours][kLaneNumbers];

__device__ inline int first_held(int j) { return (j * kNormWarps * 32 + static_cast<int>(threadIdx.x)) * kLaneNumbers; }
__device__ inline void load_norm_four(const NormCall& call, int first, float (&x)[kLaneNumbers]) {
  widen_four(call.x_type, load_four(call.x, call.x_type, int64_t{blockIdx.x} * call.dim + first), x);
}

// f(first, x): of four numbers, all of a row's; of those that are not held, a copy.
template <class F>
__device__ inline void for_fours(const NormCall& call, HeldRow& held, F f) {
#pragma unroll
  for (int j = 0; j < kHeldFours; ++j)
    if (first_held(j) < call.dim) f(first_held(j), held[j]);
  for (int j = kHeldFours; first_held(j) < call.dim; ++j) {
    float x[kLaneNumbers];
    load_norm_four(call, first_held(j), x);
    f(first_held(j), x);
  }
}

__global__ void __launch_bounds__(32 * kNormWarps) norm_kernel(const __grid_constant__ NormCall call) {
  __shared__ float room[kNormWarps];
  begin_behind();
  HeldRow held;
#pragma unroll
  for (int j = 0; j < kHeldFours; ++j)
    if (first_held(j) < call.dim) load_norm_four(call, first_held(j), held[j]);
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
#pragma unroll
    for (int i = 0; i < kLaneNumbers; ++i) {
      x[i] = (x[i] - mean) * scale;
      if (call.weight != nullptr) x[i] *= call.weight[first + i];
      if (call.bias != nullptr) x[i] += call.bias[first + i];
    }
    store_four(call.to, call.to_type, int64_t{blockIdx.x} * call.dim + first, x);
  });
}

__global__ void __launch_bounds__(32 * kStoreWarps) store_kernel(const __grid_constant__ StoreCall call) {
  __shared__ float rooms[kStoreWarps][kFours * kWarpNumbers];
  begin_behind();
  const int64_t n = call.n_rows * call.n_heads, step = int64_t{gridDim.x} * kStoreWarps;
  for (int64_t at = int64_t{blockIdx.x} * kStoreWarps + threadIdx.x / 32; at < n; at += step) {
    const int64_t row = at / call.n_heads, page = row / call.page_len, slot = row % call.page_len;
    const auto head = static_cast<int>(at % call.n_heads);
    float x[kFours][kLaneNumbers] = {};
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      const int first = first_of_four(j);
      if (first >= call.dim) continue;
      widen_four(TANDEM_F32, load_four(call.y, TANDEM_F32, at * call.dim + first), x[j]);
#pragma unroll
      for (int i = 0; i < kLaneNumbers; ++i)
        if (call.bias != nullptr) x[j][i] += call.bias[head * call.dim + first + i];
    }
    if (call.rotation.n_pairs > 0) rotate_row(call.rotation, call.page_positions[page] + slot, x, rooms[threadIdx.x / 32]);
    std::byte* const codes = call.codes + page * call.page_bytes + head * call.head_stride[0] + slot * call.row_bytes[0];
    std::byte* const scales = call.scales + page * call.page_bytes + head * call.head_stride[1] + slot * call.row_bytes[1];
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
}

}  // namespace tandem::cuda
