// SPDX-License-Identifier: MIT
// Weights far below the largest weight of their row, where products take f16.
//
// The largest weight of a row is 2^kShift, and an f16 is a multiple of 2^-24. So f16 summands keep nothing of a weight
// below 2^-38 of the largest. The loss shows in a dim where the keys with larger weights have zeros for values. So weights
// below kFar are multiplied apart, as two bf16, which have the range of an f32. V's numbers are bf16 there: codes need one,
// f16 numbers two.
#pragma once

#include "cuda/kernels/warp_ops.cuh"

namespace tandem::cuda {

template <class V>
inline constexpr bool kHasFar = V::ValueNumber::kNarrow;

// The f16 summands of weights from kFar on lose 2^-15 of them or less. Scales may make weights 2^-5 as large.
template <class V>
inline constexpr float kFar = V::kGroup > 0 ? 0x1p-3f : 0x1p-10f;

// True if some of a lane's weights are far.
template <class V, int kWeights>
__device__ inline bool any_far(const float (&weights)[kWeights]) {
  bool is_far = false;
#pragma unroll
  for (int i = 0; i < kWeights; ++i) is_far |= weights[i] > 0.0f && weights[i] < kFar<V>;
  return is_far;
}

// Takes the weight if it is far. Returns it, or 0, and leaves the rest in `weight`.
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
