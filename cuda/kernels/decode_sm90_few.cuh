// SPDX-License-Identifier: MIT
// The decode kernel for compute capability 9.0 (decode_sm90.cuh) with at most four query rows and keys that are codes.
// Conversions of codes take most of the time, so everything else is kept short. The 8 columns of a product are 4 rows of q
// in two summands each. Its 16 rows are keys or dims. In decode_sm90.cuh keys are columns.
//
//   S [16 keys x 8]   = K [16 keys x dims] q [dims x 8]     columns 2 r and 2 r + 1: the two summands of row r
//   O [16 dims x 8]  += V [16 dims x keys] P [keys x 8]     the same columns, of weights times scales
//
// A lane then has the logits of one row, t, and of keys g of every 8. The softmax takes half the instructions, and no lane
// has a missing row. A weight times a scale is an f32. It is split into two summands, its first bits and the rest. Pairs of
// these are transposed between the lanes of a warp (movmatrix), as a sum over keys needs them so.
#pragma once

#include "cuda/kernels/decode_sm90_far.cuh"

namespace tandem::cuda {

// s = q.k before scale.
template <class Shape>
__device__ inline void multiply_few_keys(uint32_t k, uint32_t scales, const StagedQueries& staged, FewLogits<Shape>& s) {
  using K = typename Shape::K;
  constexpr int kBlocks = Shape::kKeys / 8;
  static_assert(K::kKeySteps == 2 && Shape::kKSteps % 2 == 0);
  const int lane = threadIdx.x % 32;
  const uint32_t row = K::template key_row<typename Shape::KRows>(k, lane);
  KeyScales<Shape::kKScales> scale[kBlocks];
  load_few_scales<Shape>(scales, scale);
#pragma unroll
  for (int first = 0; first < Shape::kKSteps; first += 2) {
    uint32_t b[2][kBlocks][2];
    K::template keys<typename Shape::KRows>(b, row, first);
    const uint4 q = staged.fragments[first / 2 * 32 + lane];
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      float sum[4] = {};
      K::KeyNumber::multiply(sum, {b[0][n][0], b[0][n + 1][0], b[0][n][1], b[0][n + 1][1]}, {q.x, q.y});
      K::KeyNumber::multiply(sum, {b[1][n][0], b[1][n + 1][0], b[1][n][1], b[1][n + 1][1]}, {q.z, q.w});
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float each = K::kGroup > 0 ? scale[n + i].at(first / 2) : 1.0f, x = sum[2 * i] + sum[2 * i + 1];
        s[n + i] = first == 0 ? each * x : s[n + i] + each * x;
      }
    }
  }
}

// Turns logits into weights times 2^kShift. The state so far fades where a larger logit has come.
template <class Shape>
__device__ inline void weigh_few(FewLogits<Shape>& s, RowState<Shape>& state) {
  float largest = s[0];
#pragma unroll
  for (int n = 1; n < Shape::kKeys / 8; ++n) largest = fmaxf(largest, s[n]);
  for (int mask = 4; mask < 32; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
  const float before = state.m[0], now = fmaxf(before, largest);
  const float from = now == -INFINITY ? 0.0f : now - static_cast<float>(Shape::V::kShift);  // no key is seen yet
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < Shape::kKeys / 8; ++n) sum += s[n] = exp2_fast(s[n] - from);
  if (__any_sync(~0u, now != before)) {
    const float faded = now == before ? 1.0f : exp2_fast(before - now);
    state.m[0] = now;
    state.l[0] *= faded;
#pragma unroll
    for (int b = 0; b < Shape::kVSteps; ++b)
      for (int i = 0; i < 4; ++i) state.o[0][b][i] *= faded;
    fade_least<Shape>(faded, state);
  }
  state.l[0] += sum;
}

// Makes o's unit large enough for a unit's scales of V: scales times 2^-exponent are below 2.
template <class Shape>
__device__ inline void fit_exponent(const KeyScales<Shape::kVScales> (&scale)[Shape::kKeys / 8], RowState<Shape>& state) {
  using Own = KeyScales<Shape::kVScales>;
  __half2 most = __habs2(to_halves(scale[0].pairs[0]));
#pragma unroll
  for (int n = 0; n < Shape::kKeys / 8; ++n)
#pragma unroll
    for (int i = 0; i < Own::kPairs; ++i) most = __hmax2(most, __habs2(to_halves(scale[n].pairs[i])));
  if (__all_sync(~0u, __hblt2(most, __float2half2_rn(power_of_two(state.exponent + 1))))) return;
  float largest = 0.0f;
#pragma unroll
  for (int n = 0; n < Shape::kKeys / 8; ++n)
#pragma unroll
    for (int g = 0; g < Shape::kVScales; ++g)
      if (fabsf(scale[n].at(g)) < INFINITY) largest = fmaxf(largest, fabsf(scale[n].at(g)));
  for (int mask = 4; mask < 32; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  if (exponent > state.exponent) change_unit<Shape>(state, exponent);
}

// Splits a weight into two f16 summands, for columns 2 t and 2 t + 1: as many first bits as an f16 holds, and the rest.
__device__ inline uint32_t split_weight(float x) {
  const float first = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
  return Half::pack(first, x - first);
}

// o += V P.
template <class Shape>
__device__ inline void multiply_few_values(uint32_t v, uint32_t scales, FewLogits<Shape>& p, RowState<Shape>& state) {
  using V = typename Shape::V;
  using Number = typename V::ValueNumber;
  constexpr int kBlocks = Shape::kKeys / 8;
  const int lane = threadIdx.x % 32;
  const uint32_t row = V::template value_row<typename Shape::VRows, typename Shape::K>(v, lane);
  KeyScales<Shape::kVScales> scale[kBlocks];
  load_few_scales<Shape>(scales, scale);
  if constexpr (Shape::kVScales > 0) fit_exponent<Shape>(scale, state);
  const float unit = power_of_two(-state.exponent);
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) p[n] *= unit;
  uint32_t weights[kBlocks];
  for_values<Shape>(row, [&](int block, int i, const auto& a) {
    if (block == 0 || (Shape::kVScales > 0 && block % 2 == 0)) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
        weights[n] = transpose(split_weight(Shape::kVScales > 0 ? p[n] * scale[n].at(block / 2) : p[n]));
    }
#pragma unroll
    for (int k = 0; k < Shape::kKeys / 16; ++k)
      Number::multiply(state.o[0][block], a[k][i], {weights[2 * k], weights[2 * k + 1]});
  });
  if (!state.is_careful) return;
  find_least<Shape>(state);
  if (state.is_careful) multiply_few_far<Shape>(row, scales, p, state);
}

}  // namespace tandem::cuda
