// SPDX-License-Identifier: MIT
// Attention of many queries for compute capability 9.0, over K and V in 4 and 8 bits: products of warpgroups
// (prefill_sm90.cuh), of tiles that a warpgroup of its own converts (prefill_convert.cuh).
//
// Queries are one f16 each, or two where they are f32, in their row's range. No weight is rounded: it is two f16 summands.
// Where a type has scales
//
//   logits   a group's 32 dims have sums of their own, which scales take to logits while the next group's are multiplied
//   output   a group's weights times scales are made while the tensor cores have those of the group before
#pragma once

#include "cuda/kernels/prefill_convert.cuh"
#include "cuda/kernels/round.cuh"

namespace tandem::cuda {

template <class K_, class V_, int kDim_>
struct CodesShape {
  using K = K_;
  struct V {  // as prefill_work.cuh needs it
    using ValueNumber = Half;
    static constexpr int32_t kDtype = V_::kDtype;
  };
  using Number = Half;
  static constexpr int kDim = kDim_, kVDim = kDim_, kQParts = 2;
  static constexpr int kWarps = 8, kThreads = 384, kRows = 128;  // kWarps: of the warpgroups that multiply
  static constexpr int kTileKeys = kDim > 128 ? 32 : 64;
  static constexpr int kStages = kDim > 128 ? 2 : 4;
  static constexpr int kBlocksOf64 = (kDim + 63) / 64, kGroups = (kDim + 31) / 32;
  using KCodes = TileCodes<CodesShape, K_, false>;
  using VCodes = TileCodes<CodesShape, V_, true>;
  static constexpr int kKScales = K_::kGroup > 0 ? kGroups : 0, kVScales = V_::kGroup > 0 ? kGroups : 0;
  static constexpr int kQPartBytes = kRows * 128 * kBlocksOf64, kTileBytes = kTileKeys * 128 * kBlocksOf64;
  using KPlaces = ScalePlaces<kTileKeys, 4>;
  using VPlaces = ScalePlaces<kTileKeys, 2>;
  static constexpr int kKScaleBytes = kKScales * KPlaces::kGroupBytes, kVScaleBytes = kVScales * VPlaces::kGroupBytes;

  // Addresses in shared memory: q, tiles of K and of V, their scales, exponents.
  struct Places {
    uint32_t q;
    uint32_t unit_words;
    __device__ uint32_t tile(bool is_v, int stage) const {
      return q + kQParts * kQPartBytes + ((is_v ? kStages : 0) + stage) * kTileBytes;
    }
    __device__ uint32_t scales(bool is_v, int stage) const {
      return tile(false, 2 * kStages) + (is_v ? kStages * kKScaleBytes + stage * kVScaleBytes : stage * kKScaleBytes);
    }
    __device__ uint32_t exponent(int stage) const { return unit_words + 32 + 4 * stage; }
  };
  static constexpr int kStateStride = kVDim + (40 - kVDim % 32) % 32;  // rows 8 banks apart
  static constexpr int kStateFloats = kRows * (kStateStride + 2);
  static constexpr int kUsedBytes = kQParts * kQPartBytes + kStages * (2 * kTileBytes + kKScaleBytes + kVScaleBytes);
  static constexpr int kSharedBytes = 1024 + (kUsedBytes > 4 * kStateFloats ? kUsedBytes : 4 * kStateFloats);
  static constexpr int kBlocks = 1;
  __device__ static void sync() { sync_threads(kSyncAll, 32 * kWarps); }
  static constexpr int kSyncAll = 1, kSyncConvert = 2, kOwn = 4;  // barriers; of the last each warpgroup has one
};

// ---- queries -----------------------------------------------------------------------------------------------------------

// A warp's 16 rows: [parts][blocks of 64 dims][128 rows]. scale: what undoes what moved a row into an f16's range, of rows g
// and g + 8.
template <class Shape>
__device__ inline void bring_rows(const PrefillCall& call, const Piece& piece, uint32_t q, float (&scale)[2]) {
  constexpr int kAtOnce = 8, kFoursOfRow = (Shape::kDim + kWarpNumbers - 1) / kWarpNumbers;
  const int lane = static_cast<int>(threadIdx.x) % 32, first = static_cast<int>(threadIdx.x) / 32 * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 loaded[kAtOnce][kFoursOfRow];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + kAtOnce * half + i;
      const int64_t at = row_offset(call, piece, min(row, piece.n_rows - 1), call.q.token_stride, call.q.head_stride);
#pragma unroll
      for (int j = 0; j < kFoursOfRow; ++j) {
        loaded[i][j] = {};
        if (row < piece.n_rows && first_of_four(j) < Shape::kDim)
          loaded[i][j] = load_four(call.q.data, call.q.dtype, at + first_of_four(j));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + kAtOnce * half + i;
      float x[kFoursOfRow][kLaneNumbers];
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < kFoursOfRow; ++j) {
        widen_four(call.q.dtype, loaded[i][j], x[j]);
        for (int k = 0; k < kLaneNumbers; ++k) largest = max(largest, bits_of(x[j][k]) & 0x7fffffffu);
      }
      const int exponent = to_range(__uint_as_float(__reduce_max_sync(~0u, largest)));
      if (lane / 4 == i) scale[half] = power_of_two(-exponent);
#pragma unroll
      for (int j = 0; j < kFoursOfRow; ++j) {
        if (first_of_four(j) >= Shape::kDim) continue;
        uint32_t low[Shape::kQParts], high[Shape::kQParts];
        for (int k = 0; k < kLaneNumbers; ++k) x[j][k] *= power_of_two(exponent);
        split<Half>(x[j][0], x[j][1], low);
        split<Half>(x[j][2], x[j][3], high);
        const uint32_t to = q + first_of_four(j) / 64 * (Shape::kRows * 128) + swizzled(row, first_of_four(j) % 64 / 8) +
                            first_of_four(j) % 8 * 2;
        for (int p = 0; p < Shape::kQParts; ++p) store_words(to + p * Shape::kQPartBytes, low[p], high[p]);
      }
    }
  }
  fence_products();
  sync_threads(Shape::kOwn + static_cast<int>(threadIdx.x) / 128, 128);
}

// ---- logits ------------------------------------------------------------------------------------------------------------

// sums = q k over the dims of steps [first, end), 16 each.
template <class Shape, int kParts, int kFirst, int kEnd>
__device__ inline void multiply_steps(uint32_t q, uint32_t k, float (&sums)[Shape::kTileKeys / 2]) {
  begin_products();
#pragma unroll
  for (int p = 0; p < kParts; ++p)
#pragma unroll
    for (int j = kFirst; j < kEnd; ++j)
      Wgmma<Half, Shape::kTileKeys>::keys(
          sums, describe_matrix(q + p * Shape::kQPartBytes + j / 4 * (Shape::kRows * 128) + j % 4 * 32, 16),
          describe_matrix(k + j / 4 * (Shape::kTileKeys * 128) + j % 4 * 32, 16), p > 0 || j > kFirst);
  commit_products();
}

// s += scales times a group's sums, or is that.
template <class Shape>
__device__ inline void add_group(uint32_t scales, int group, const float (&sums)[Shape::kTileKeys / 2],
                                 float (&s)[Shape::kTileKeys / 2]) {
  const uint32_t at = scales + Shape::KPlaces::of_thread(group, threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < Shape::kTileKeys / 8; n += 2) {
    const float4 four = load_floats(at + 8 * n);
    const float scale[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float factor = scale[i / 4 * 2 + i % 2];
      s[4 * n + i] = group == 0 ? factor * sums[4 * n + i] : fmaf(factor, sums[4 * n + i], s[4 * n + i]);
    }
  }
}

template <class Shape, int kParts, int kGroup>
__device__ inline void multiply_groups(uint32_t q, uint32_t k, uint32_t scales, float (&sums)[2][Shape::kTileKeys / 2],
                                       float (&s)[Shape::kTileKeys / 2]) {
  constexpr int kSteps = Shape::kDim / 16, kNext = 2 * kGroup + 2;
  if constexpr (kNext < kSteps) {
    multiply_steps<Shape, kParts, kNext, (kNext + 2 < kSteps ? kNext + 2 : kSteps)>(q, k, sums[(kGroup + 1) % 2]);
    wait_for_products<1>();
  } else {
    wait_for_products<0>();
  }
  pin(sums[kGroup % 2]);
  add_group<Shape>(scales, kGroup, sums[kGroup % 2], s);
  if constexpr (kNext < kSteps) multiply_groups<Shape, kParts, kGroup + 1>(q, k, scales, sums, s);
}

template <class Shape, int kParts>
__device__ inline void form_products(uint32_t q, uint32_t k, uint32_t scales, float (&s)[Shape::kTileKeys / 2]) {
  if constexpr (Shape::kKScales > 0) {
    float sums[2][Shape::kTileKeys / 2];
    multiply_steps<Shape, kParts, 0, 2>(q, k, sums[0]);
    multiply_groups<Shape, kParts, 0>(q, k, scales, sums, s);
  } else {
    multiply_steps<Shape, kParts, 0, Shape::kDim / 16>(q, k, s);
    wait_for_products<0>();
    pin(s);
  }
}

template <class Shape>
__device__ inline void cap(const PrefillCall& call, float (&scale)[2], float (&s)[Shape::kTileKeys / 2]) {
#pragma unroll
  for (int i = 0; i < Shape::kTileKeys / 2; ++i) s[i] = call.soft_cap * kLog2E * tanhf(s[i] * scale[i / 2 % 2]);
  scale[0] = scale[1] = 1.0f;
}

// ---- output ------------------------------------------------------------------------------------------------------------

// Weights as A fragments: of 16 keys, as two summands.
template <class Shape>
using Weights = uint32_t[Shape::kTileKeys / 16][2][4];

template <class Shape>
__device__ inline void split_weights(const float (&s)[Shape::kTileKeys / 2], Weights<Shape>& p) {
#pragma unroll
  for (int j = 0; j < Shape::kTileKeys / 16; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t parts[2];
      split<Half>(s[8 * j + 2 * i], s[8 * j + 2 * i + 1], parts);
      p[j][0][i] = parts[0], p[j][1][i] = parts[1];
    }
}

__device__ inline __half2 halves_of(uint32_t pair) { return *reinterpret_cast<const __half2*>(&pair); }
__device__ inline uint32_t pair_of(__half2 halves) { return *reinterpret_cast<const uint32_t*>(&halves); }

// Weights times the scales of a group, of which the first summand's rounding goes to the second.
template <class Shape>
__device__ inline void scale_weights(uint32_t scales, int group, const Weights<Shape>& p, Weights<Shape>& scaled) {
  const uint32_t at = scales + Shape::VPlaces::of_thread(group, threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < Shape::kTileKeys / 8; n += 4) {
    const float4 four = load_floats(at + 4 * n);
    const uint32_t pairs[4] = {__float_as_uint(four.x), __float_as_uint(four.y), __float_as_uint(four.z),
                               __float_as_uint(four.w)};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int j = (n + i / 2) / 2, at_fragment = i / 2 % 2 * 2 + i % 2;
      const __half2 scale = halves_of(pairs[i / 2]), high = __hmul2_rn(halves_of(p[j][0][at_fragment]), scale);
      const __half2 left = __hfma2(halves_of(p[j][0][at_fragment]), scale, __hneg2(high));
      scaled[j][0][at_fragment] = pair_of(high);
      scaled[j][1][at_fragment] = pair_of(__hfma2(halves_of(p[j][1][at_fragment]), scale, left));
    }
  }
}

// o += weights times kWidth columns of V.
template <class Shape, int kWidth>
__device__ inline void multiply_columns(const Weights<Shape>& p, uint32_t v, float (&o)[kWidth / 2]) {
  begin_products();
#pragma unroll
  for (int j = 0; j < Shape::kTileKeys / 16; ++j)
#pragma unroll
    for (int part = 0; part < 2; ++part)
      Wgmma<Half, kWidth>::values(o, p[j][part], describe_matrix(v + j * 2048, Shape::kTileKeys * 128));
  commit_products();
}

template <class Shape, int kGroup>
__device__ inline void multiply_value_groups(uint32_t v, uint32_t scales, const Weights<Shape>& p,
                                             Weights<Shape> (&scaled)[2], GroupSums<Shape>& state) {
  constexpr int kFirst = 32 * kGroup, kWidth = Shape::kVDim - kFirst < 32 ? Shape::kVDim - kFirst : 32;
  if constexpr (kGroup >= 2) wait_for_products<1>();
  scale_weights<Shape>(scales, kGroup, p, scaled[kGroup % 2]);
  multiply_columns<Shape, kWidth>(scaled[kGroup % 2], v + kGroup / 2 * (Shape::kTileKeys * 128) + kGroup % 2 * 64,
                                  reinterpret_cast<float(&)[kWidth / 2]>(state.o[kFirst / 2]));
  if constexpr (kFirst + 32 < Shape::kVDim) multiply_value_groups<Shape, kGroup + 1>(v, scales, p, scaled, state);
}

template <class Shape>
__device__ inline void add_values(uint32_t v, uint32_t scales, const Weights<Shape>& p, GroupSums<Shape>& state) {
  if constexpr (Shape::kVScales > 0) {
    Weights<Shape> scaled[2];
    multiply_value_groups<Shape, 0>(v, scales, p, scaled, state);
  } else {
    multiply_columns<Shape, Shape::kVDim>(p, v, state.o);
  }
  wait_for_products<0>();
  pin(state.o);
}

// ---- the kernel --------------------------------------------------------------------------------------------------------

// A warpgroup's way through the tiles. kParts: summands of q; row_scale: of q.
template <class Shape, int kParts>
__device__ inline void attend_codes(const PrefillCall& call, const PrefillItem& item, const typename Shape::Places& places,
                                    TileBarriers<Shape> barriers, const float (&row_scale)[2], GroupSums<Shape>& state) {
  const int group = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4, n_tiles = item.end_tile - item.first_tile;
  const RowKeys keys[2] = {keys_of_row(call, item, row), keys_of_row(call, item, row + 8)};
  const auto wait_full = [&](bool is_v, int n) {
    wait_barrier(barriers.full(is_v, n % Shape::kStages), n / Shape::kStages % 2);
    fence_products();
  };
  const auto release = [&](bool is_v, int n) {
    __syncwarp();  // lanes have read scales
    if (lane == 0) arrive(barriers.free(is_v, n % Shape::kStages));
  };
  int exponent = kUnitExponent;
  for (int n = 0; n < n_tiles; ++n) {
    const int stage = n % Shape::kStages, base = (item.first_tile + n) * Shape::kTileKeys;
    float s[Shape::kTileKeys / 2], faded[2];
    float scale[2] = {row_scale[0] * logit_scale(call), row_scale[1] * logit_scale(call)};
    wait_full(false, n);
    form_products<Shape, kParts>(places.q + group * 64 * 128, places.tile(false, stage), places.scales(false, stage), s);
    release(false, n);
    if (call.soft_cap > 0.0f) cap<Shape>(call, scale, s);
    if (base < item.common_lo || base + Shape::kTileKeys > item.common_hi) mask_tile<Shape>(keys, base, s);
    weigh<Shape>(scale, s, state, faded);
    Weights<Shape> p;
    split_weights<Shape>(s, p);
    wait_full(true, n);
    if constexpr (Shape::kVScales > 0) {
      const int before = exponent;
      exponent = static_cast<int>(load_word(places.exponent(stage)));
      for (float& x : faded) x *= power_of_two(before - exponent);
    }
    fade<Shape>(faded, state);
    add_values<Shape>(places.tile(true, stage), places.scales(true, stage), p, state);
    release(true, n);
  }
#pragma unroll
  for (int i = 0; i < Shape::kVDim / 2; ++i) state.o[i] *= power_of_two(exponent - kUnitExponent);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) prefill_codes_kernel(const __grid_constant__ PrefillCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ __align__(8) uint64_t barrier_words[kBarriersOfStage * Shape::kStages];
  __shared__ uint32_t unit_words[8 + Shape::kStages];
  __shared__ int is_last;
  const PrefillItem item = find_item<Shape>(call);
  if (item.piece.n_rows == 0) return;
  std::byte* const aligned = shared + (1024 - shared_address(shared) % 1024) % 1024;
  const typename Shape::Places places{shared_address(aligned), shared_address(unit_words)};
  const TileBarriers<Shape> barriers{shared_address(barrier_words)};
  if (threadIdx.x == 0) init_barriers(barriers);
  __syncthreads();
  if (threadIdx.x >= 256) {
    give_registers<80>();
    convert_tiles<Shape>(call, item, places, barriers);
  } else {
    take_registers<216>();
    float row_scale[2];
    bring_rows<Shape>(call, item.piece, places.q, row_scale);
    GroupSums<Shape> state;
    state.clear();
    if (call.n_q_parts == 1)
      attend_codes<Shape, 1>(call, item, places, barriers, row_scale, state);
    else
      attend_codes<Shape, 2>(call, item, places, barriers, row_scale, state);
    Shape::sync();
    float* own =
        call.n_splits == 1 ? reinterpret_cast<float*>(aligned) : call.states + int64_t{blockIdx.x} * Shape::kStateFloats;
    store_group<Shape>(state, own);
    finish_item<Shape>(call, item, own, &is_last);
  }
#endif
}

}  // namespace tandem::cuda
