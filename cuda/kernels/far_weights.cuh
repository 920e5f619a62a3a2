// SPDX-License-Identifier: MIT
// Weights far below the largest of their row, where products take f16.
//
// The largest weight of a row is 2^kShift, and an f16 is a multiple of 2^-24: of a weight below 2^-38 of the largest its
// summands keep nothing. That is seen in a dim where the keys that weigh more have zeros for values. So weights below kFar
// are multiplied apart: as two bf16, which have the range of an f32, by V's numbers as bf16, of which codes need one and f16
// two.
#pragma once

#include "cuda/kernels/warp_ops.cuh"

namespace tandem::cuda {

template <class V>
inline constexpr bool kHasFar = V::ValueNumber::kNarrow;

// What f16 summands of weights from here on lose is 2^-15 of them or less; scales may make them 2^-5 as large.
template <class V>
inline constexpr float kFar = V::kGroup > 0 ? 0x1p-3f : 0x1p-10f;

// Of a lane's weights: whether some are far.
template <class V, int kWeights>
__device__ inline bool any_far(const float (&weights)[kWeights]) {
  bool is_far = false;
#pragma unroll
  for (int i = 0; i < kWeights; ++i) is_far |= weights[i] > 0.0f && weights[i] < kFar<V>;
  return is_far;
}

// A weight that is far, else 0; what stays is the other of the two.
template <class V>
__device__ inline float take_far(float& weight) {
  const float far = weight < kFar<V> ? weight : 0.0f;
  weight -= far;
  return far;
}

// A fragment of V's f16 numbers as sums of bf16.
template <class V>
struct WideFragment {
  static constexpr int kParts = V::kBits == 16 ? 2 : 1;
  uint32_t of[kParts][4];

  __device__ explicit WideFragment(const uint32_t (&halves)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Half::unpack(halves[i]);
      uint32_t parts[kParts];
      split<Bfloat>(pair.x, pair.y, parts);
      for (int part = 0; part < kParts; ++part) of[part][i] = parts[part];
    }
  }
};

}  // namespace tandem::cuda
