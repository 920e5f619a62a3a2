// SPDX-License-Identifier: MIT
// Weights far below the largest weight of their row (far_weights.cuh), in the decode kernel for compute capability 9.0
// (decode_sm90.cuh).
//
// Such weights are frequent, and multiplying them apart takes as long as all other work. So a warp does it (is_careful)
// only until every sum of its state is so large that all of its keys together could not lose anything of note. From then on
// these sums of magnitudes only grow, except where they fade.
#pragma once

#include "cuda/kernels/decode_sm90_scales.cuh"

namespace tandem::cuda {

template <class Shape>
__device__ inline void find_least(RowState<Shape>& state) {
  using V = typename Shape::V;
  const int g = threadIdx.x % 32 / 4;
  float least = INFINITY;
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
    for (int b = 0; b < Shape::kVSteps; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (Shape::kVDim % 32 != 0 && V::value_dim(b, g + 8 * half) >= Shape::kVDim) continue;
        const float x = state.o[n][b][2 * half], y = state.o[n][b][2 * half + 1];
        const float smaller = Shape::kIsFew ? fabsf(x + y) : fminf(fabsf(x), fabsf(y));
        least = fminf(least, smaller * V::value_factor(8 * half));
      }
  state.least = least;
  fade_least<Shape>(1.0f, state);
}

// ---- of few rows -------------------------------------------------------------------------------------------------------

// Returns the rest that the two f16 summands of a weight leave, as two bf16.
__device__ inline uint32_t split_rest(float x) {
  const float first = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
  const float2 taken = Half::unpack(Half::pack(first, x - first));
  const float rest = (first - taken.x) + (x - first - taken.y);
  const float high = __uint_as_float(__float_as_uint(rest) & 0xffff0000u);
  return Bfloat::pack(high, rest - high);
}

template <class Shape>
using FewScales = KeyScales<Shape::kVScales>[Shape::kKeys / 8];

// Loads the scales of a lane's keys.
template <class Shape, int kScales>
__device__ inline void load_few_scales(uint32_t scales, KeyScales<kScales> (&to)[Shape::kKeys / 8]) {
  if constexpr (kScales > 0) {
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n)
      to[n].load(scales + 2 * kScales * (8 * n + Shape::K::key_of(static_cast<int>(threadIdx.x % 32 / 4))));
  }
}

template <class Shape>
__device__ inline float scaled_weight(const FewLogits<Shape>& p, const FewScales<Shape>& scale, int n, int group) {
  if constexpr (Shape::kVScales > 0)
    return p[n] * scale[n].at(group);
  else
    return p[n];
}

// o += V P, for the rests that f16 summands of the weights leave.
template <class Shape>
__device__ inline void multiply_few_far(uint32_t row, uint32_t scales, const FewLogits<Shape>& p, RowState<Shape>& state) {
  using V = typename Shape::V;
  constexpr float kLeast = 0x1p-9f;  // weights from here on are exact enough in f16
  // Scales are loaded again, as the compiler would otherwise keep values made of them, for which there are no registers.
  __syncwarp();
  FewScales<Shape> scale;
  load_few_scales<Shape>(scales, scale);
  bool has_far = false;
#pragma unroll
  for (int n = 0; n < Shape::kKeys / 8; ++n)
#pragma unroll
    for (int g = 0; g < (Shape::kVScales > 0 ? Shape::kVScales : 1); ++g) {
      const float x = fabsf(scaled_weight<Shape>(p, scale, n, g));
      has_far |= x > 0.0f && x < kLeast;
    }
  if (!__any_sync(~0u, has_far)) return;
  uint32_t weights[Shape::kKeys / 8];
  for_values<Shape>(row, [&](int block, int i, const auto& a) {
    if (block == 0 || (Shape::kVScales > 0 && block % 2 == 0)) {
#pragma unroll
      for (int n = 0; n < Shape::kKeys / 8; ++n)
        weights[n] = transpose(split_rest(scaled_weight<Shape>(p, scale, n, block / 2)));
    }
#pragma unroll
    for (int k = 0; k < Shape::kKeys / 16; ++k) {
      const WideFragment<V> wide(a[k][i]);
#pragma unroll
      for (int part = 0; part < wide.kParts; ++part)
        Bfloat::multiply(state.o[0][block], wide.of[part], {weights[2 * k], weights[2 * k + 1]});
    }
  });
}

// ---- of more rows ------------------------------------------------------------------------------------------------------

// o += V P, for weights that are far. Sets these to 0 in p. scales: those of V, unchanged.
template <class Shape>
__device__ inline void multiply_far(uint32_t v, uint32_t scales, Logits<Shape>& p, RowState<Shape>& state) {
  using V = typename Shape::V;
  constexpr int kBlocks = Shape::kKeys / 8;
  const int lane = threadIdx.x % 32;
  const uint32_t row = V::template value_row<typename Shape::VRows, typename Shape::K>(v, lane);
  const float unit = power_of_two(-state.exponent);
  KeyScales<Shape::kVScales> scale[kBlocks][2];
  float far[Shape::kTiles][kBlocks][2];
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (Shape::kVScales > 0)
        scale[n][i].load(scales + 2 * Shape::kVScales * (8 * n + Shape::K::key_of(lane % 4 * 2 + i)));
#pragma unroll
      for (int tile = 0; tile < Shape::kTiles; ++tile) far[tile][n][i] = take_far<V>(p[tile][n][i]) * unit;
    }
  uint32_t b[2][Shape::kTiles][kBlocks];
  for_values<Shape>(row, [&](int block, int i, const auto& a) {
    if (block == 0 || (Shape::kVScales > 0 && block % 2 == 0)) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        float each[2] = {1.0f, 1.0f};
        if constexpr (Shape::kVScales > 0)
          for (int k = 0; k < 2; ++k) each[k] = scale[n][k].at(block / 2);
#pragma unroll
        for (int tile = 0; tile < Shape::kTiles; ++tile) {
          uint32_t parts[2];
          split<Bfloat>(far[tile][n][0] * each[0], far[tile][n][1] * each[1], parts);
          b[0][tile][n] = parts[0], b[1][tile][n] = parts[1];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < Shape::kKeys / 16; ++k) {
      const WideFragment<V> wide(a[k][i]);
#pragma unroll
      for (int tile = 0; tile < Shape::kTiles; ++tile)
#pragma unroll
        for (int part = 0; part < wide.kParts; ++part)
#pragma unroll
          for (int weight = 0; weight + part < 2; ++weight)
            Bfloat::multiply(state.o[tile][block], wide.of[part], {b[weight][tile][2 * k], b[weight][tile][2 * k + 1]});
    }
  });
}

// Called before p is multiplied. Handles far weights if the warp has to be careful. With f16 numbers, which may be large,
// sums are seldom large enough, so they are checked only once some weights are far.
template <class Shape>
__device__ inline void attend_far(uint32_t v, uint32_t scales, Logits<Shape>& p, RowState<Shape>& state) {
  using V = typename Shape::V;
  constexpr bool kLooksFirst = V::kBits < 16;
  if (kLooksFirst && state.is_careful) find_least<Shape>(state);
  if (!state.is_careful) return;
  bool has_far = false;
#pragma unroll
  for (int tile = 0; tile < Shape::kTiles; ++tile)
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n) has_far |= any_far<V>(p[tile][n]);
  if (!__any_sync(~0u, has_far)) return;
  if (!kLooksFirst) find_least<Shape>(state);
  if (state.is_careful) multiply_far<Shape>(v, scales, p, state);
}

}  // namespace tandem::cuda
