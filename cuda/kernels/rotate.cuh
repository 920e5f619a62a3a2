// SPDX-License-Identifier: MIT
// Rotation of new rows.
//
// By a Walsh-Hadamard matrix (lib/model/hadamard.h): the bits of a number's index are, from the highest, the lane's four (1
// bit), the lane (5) and the place in the four (2). Host and kernel both sum over the highest bit first, so their sums are
// the same to the last bit.
//
// Rotary embedding, by the host's tables (lib/model/rope.h). As on the host, the angle of a position is a product of the
// angles of its base-256 digits, in f32.
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/round.cuh"

namespace tandem::cuda {

__device__ inline int64_t position_of(const AppendCall& call, const DeviceSequence& sequence, int token) {
  return call.append.positions != nullptr ? call.append.positions[token] : sequence.position + (token - sequence.first_row);
}

// Returns cos and sin of a pair, times the model's factor.
__device__ inline float2 angle_of(const Rotation& rotation, int64_t position, int pair) {
  const int n = rotation.n_pairs;
  const float* row = rotation.cos_sin + (position & 255) * 2 * n + pair;
  float c = row[0], s = row[n];
#pragma unroll
  for (int digit = 1; digit < RopeTable::kDigits; ++digit) {
    const int64_t value = position >> 8 * digit & 255;
    if (value == 0) continue;
    row = rotation.cos_sin + (digit * 256 + value) * 2 * n + pair;
    const float x = c, y = s;
    c = x * row[0] - y * row[n];
    s = x * row[n] + y * row[0];
  }
  return make_float2(c * rotation.attn_factor, s * rotation.attn_factor);
}

// Rotates a warp's row in place. room: kFours * kWarpNumbers floats, as the two numbers of a pair are in different lanes.
__device__ inline void rotate_row(const Rotation& rotation, int64_t position, float (&x)[kFours][kLaneNumbers],
                                  float* room) {
  __syncwarp();  // all lanes have read the room's last contents
#pragma unroll
  for (int j = 0; j < kFours; ++j)
    *reinterpret_cast<float4*>(room + first_of_four(j)) = make_float4(x[j][0], x[j][1], x[j][2], x[j][3]);
  __syncwarp();
  const int n = rotation.n_pairs;
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < kLaneNumbers; ++i) {
      const int dim = first_of_four(j) + i;
      if (dim >= 2 * n) continue;
      const bool is_second = rotation.is_interleaved != 0 ? dim % 2 == 1 : dim >= n;
      const int pair = rotation.is_interleaved != 0 ? dim / 2 : dim % n;
      const int other = rotation.is_interleaved != 0 ? dim ^ 1 : is_second ? dim - n : dim + n;
      const float2 angle = angle_of(rotation, position, pair);
      x[j][i] = is_second ? room[other] * angle.y + x[j][i] * angle.x : x[j][i] * angle.x - room[other] * angle.y;
    }
}

// Transforms a warp's row of dim numbers in place. dim is a power of two, and numbers behind them are 0. factor: 1 /
// sqrt(dim).
__device__ inline void hadamard_row(int dim, float factor, float (&x)[kFours][kLaneNumbers]) {
  static_assert(kFours == 2 && kLaneNumbers == 4);
  const auto pair = [](float& a, float& b) {
    const float sum = __fadd_rn(a, b);
    b = __fsub_rn(a, b);
    a = sum;
  };
  if (dim > kWarpNumbers) {
#pragma unroll
    for (int i = 0; i < kLaneNumbers; ++i) pair(x[0][i], x[1][i]);
  }
  for (unsigned lane_bit = min(dim, kWarpNumbers) / kLaneNumbers / 2; lane_bit > 0; lane_bit /= 2) {
    const bool is_second = (threadIdx.x & lane_bit) != 0;
#pragma unroll
    for (int j = 0; j < kFours; ++j)
#pragma unroll
      for (int i = 0; i < kLaneNumbers; ++i) {
        const float other = __shfl_xor_sync(~0u, x[j][i], lane_bit);
        x[j][i] = is_second ? __fsub_rn(other, x[j][i]) : __fadd_rn(x[j][i], other);
      }
  }
#pragma unroll
  for (int j = 0; j < kFours; ++j) {
    pair(x[j][0], x[j][2]);
    pair(x[j][1], x[j][3]);
    pair(x[j][0], x[j][1]);
    pair(x[j][2], x[j][3]);
#pragma unroll
    for (int i = 0; i < kLaneNumbers; ++i) x[j][i] = __fmul_rn(x[j][i], factor);
  }
}

__device__ inline void store_floats(float* to, const float (&x)[kFours][kLaneNumbers], int dim) {
#pragma unroll
  for (int j = 0; j < kFours; ++j)
    if (first_of_four(j) < dim)
      *reinterpret_cast<float4*>(to + first_of_four(j)) = make_float4(x[j][0], x[j][1], x[j][2], x[j][3]);
}

}  // namespace tandem::cuda
