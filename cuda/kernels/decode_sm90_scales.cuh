// SPDX-License-Identifier: MIT
// Scales of codes in the decode kernel for compute capability 9.0 (decode_sm90.cuh).
//
// Scales of K are applied to sums, in f32. Scales of V are applied to weights. A weight is a sum of two f16 numbers, 22
// bits, and so is a weight times a scale. f16 numbers have little range. So a warp's o is in units of 2^exponent, and
// scales of V are multiplied by 2^-exponent, which leaves them from 2^(1 - kBand) to 2. The exponent grows with the scales
// that a warp meets. Smaller scales of a unit are multiplied in rounds of their own, kBand powers of two at a time, with o
// in smaller units meanwhile.
//
// A product of a weight and a scale is exact to 2^-22 of itself, or to 2^-40 of the largest possible one. Weights far below
// the largest are multiplied apart (decode_sm90_far.cuh).
#pragma once

#include "cuda/kernels/decode_sm90_states.cuh"

namespace tandem::cuda {

// The scales of a key's groups, in pairs.
template <int kScales>
struct KeyScales {
  static constexpr int kPairs = (kScales + 1) / 2;
  uint32_t pairs[kPairs > 0 ? kPairs : 1];

  __device__ void load(uint32_t at) {
    if constexpr (kScales % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kPairs; i += 2) {
        const uint2 words = load_two_words(at + 4 * i);
        pairs[i] = words.x, pairs[i + 1] = words.y;
      }
    } else if constexpr (kScales % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) pairs[i] = load_word(at + 4 * i);
    } else {
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        uint16_t bits;
        asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(bits) : "r"(at + 2 * i) : "memory");
        pairs[i / 2] = i % 2 == 0 ? bits * 0x10001u : pairs[i / 2] & 0xffffu | static_cast<uint32_t>(bits) << 16;
      }
    }
  }
  __device__ float at(int group) const {
    const float2 both = Half::unpack(pairs[group / 2]);
    return group % 2 == 0 ? both.x : both.y;
  }
};

// Loads scales of K. A lane's keys of a unit are places 2 t and 2 t + 1 of every 8.
template <class Shape>
__device__ inline void load_key_scales(uint32_t scales, KeyScales<Shape::kKScales> (&to)[Shape::kKeys / 8][2]) {
  if constexpr (Shape::kKScales > 0) {
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        to[n][i].load(scales + 2 * Shape::kKScales * (8 * n + Shape::K::key_of(static_cast<int>(threadIdx.x % 4) * 2 + i)));
  }
}

// ---- pairs of f16 ------------------------------------------------------------------------------------------------------

__device__ inline __half2 to_halves(uint32_t pair) { return *reinterpret_cast<const __half2*>(&pair); }
__device__ inline uint32_t to_bits(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }

// (first + second) scale, for f16 numbers. second is the remainder that first leaves. The rounding error of the first
// product is an f16 number, too.
__device__ inline void scale_parts(uint32_t first, uint32_t second, uint32_t scale, uint32_t (&to)[2]) {
  const __half2 factor = to_halves(scale), product = __hmul2_rn(to_halves(first), factor);
  const __half2 rest = __hfma2(to_halves(first), factor, __hneg2(product));
  to[0] = to_bits(product);
  to[1] = to_bits(__hfma2(to_halves(second), factor, rest));
}

// ---- V -----------------------------------------------------------------------------------------------------------------

template <class Shape>
__device__ inline void multiply_state(RowState<Shape>& state, float factor) {
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n)
    for (int b = 0; b < Shape::kVSteps; ++b)
      for (int i = 0; i < 4; ++i) state.o[n][b][i] *= factor;
}

template <class Shape>
__device__ inline void change_unit(RowState<Shape>& state, int exponent) {
  const float factor = power_of_two(state.exponent - exponent);
  multiply_state<Shape>(state, factor);
  fade_least<Shape>(factor, state);
  state.exponent = exponent;
}

// A unit's scales of V, in o's units. A lane has the scales of one key, and stores them for all lanes: for each group, the
// pairs of lane t's keys of every 8.
template <class Shape>
struct ValueScales {
  static constexpr int kBand = 6;
  using Own = KeyScales<Shape::kVScales>;
  uint32_t from, to;
  int band = 0;
  bool has_rest = false;

  // Makes o's unit large enough. The first round takes all scales but those that are much smaller.
  __device__ void begin(RowState<Shape>& state) {
    const Own own = load();
    __half2 most = __habs2(to_halves(own.pairs[0])), least = most;
#pragma unroll
    for (int i = 1; i < Own::kPairs; ++i) {
      most = __hmax2(most, __habs2(to_halves(own.pairs[i])));
      least = __hmin2(least, __habs2(to_halves(own.pairs[i])));
    }
    const bool fits = __hblt2(most, __float2half2_rn(end(state))) && __hbge2(least, __float2half2_rn(begin_of_band(state)));
    if (__all_sync(~0u, fits))
      store(own, power_of_two(-state.exponent), [](float) { return true; });
    else
      begin_anew(own, state);
  }
  // Goes on to the scales of the next band.
  __device__ void go_on(RowState<Shape>& state) {
    __syncwarp();
    const Own own = load();
    const float end = begin_of_band(state);
    ++band;
    multiply_state<Shape>(state, power_of_two(kBand));
    store_band(own, end, state);
    __syncwarp();
  }
  __device__ void finish(RowState<Shape>& state) const {
    if (band > 0) multiply_state<Shape>(state, power_of_two(-kBand * band));
  }

 private:
  __device__ static float end(const RowState<Shape>& state) { return power_of_two(state.exponent + 1); }
  __device__ float begin_of_band(const RowState<Shape>& state) const {
    return power_of_two(state.exponent + 1 - kBand * (band + 1));
  }
  __device__ Own load() const {
    Own own;
    own.load(from + 2 * Shape::kVScales * (threadIdx.x % 32));
    return own;
  }
  template <class IsHere>
  __device__ void store(const Own& own, float factor, IsHere is_here) const {
    const int key = static_cast<int>(threadIdx.x % 32), place = Shape::K::place_of(key % 8);
    const uint32_t at = to + place / 2 * 16 + key / 8 * 4 + place % 2 * 2;
#pragma unroll
    for (int g = 0; g < Shape::kVScales; ++g) {
      const float scale = own.at(g);
      store_half(at + 64 * g, __half_as_ushort(__float2half_rn(is_here(fabsf(scale)) ? scale * factor : 0.0f)));
    }
  }
  // NaN and infinite scales are in every band.
  __device__ void store_band(const Own& own, float end, const RowState<Shape>& state) {
    const float begin = begin_of_band(state);
    bool is_smaller = false;
#pragma unroll
    for (int g = 0; g < Shape::kVScales; ++g) is_smaller |= own.at(g) != 0.0f && fabsf(own.at(g)) < begin;
    has_rest = __any_sync(~0u, is_smaller);
    store(own, power_of_two(kBand * band - state.exponent), [=](float x) { return !(x < begin || x >= end); });
  }
  __device__ void begin_anew(const Own& own, RowState<Shape>& state) {
    float largest = 0.0f;
#pragma unroll
    for (int g = 0; g < Shape::kVScales; ++g)
      if (fabsf(own.at(g)) < INFINITY) largest = fmaxf(largest, fabsf(own.at(g)));
    for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    if (largest >= end(state)) change_unit<Shape>(state, static_cast<int>(__float_as_uint(largest) >> 23) - 127);
    store_band(own, NAN, state);
  }
};

}  // namespace tandem::cuda
