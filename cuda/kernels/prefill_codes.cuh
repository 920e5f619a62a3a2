// SPDX-License-Identifier: MIT
// Attention of many queries for compute capability 9.0, over K and V in 4 and 8 bits: products of warpgroups
// (prefill_sm90.cuh), of tiles that a warpgroup of its own converts (prefill_convert.cuh).
//
// Queries are one f16 each, or two where they are f32, in their row's range. No weight is rounded: it is two summands of V's
// type of number.
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
  using V = V_;
  using Number = typename V::ValueNumber;  // of weights
  static constexpr int kDim = kDim_, kKDim = kDim_, kVDim = kDim_, kQParts = 2;
  static constexpr int kWarps = 8, kThreads = 384, kRows = 128;  // kWarps: of the warpgroups that multiply
  // Registers of a thread that multiplies and of one that converts: more than a block begins with, and it waits for ever.
  static constexpr int kMultiplierRegisters = 216, kConverterRegisters = 72;
  static_assert(2 * kMultiplierRegisters + kConverterRegisters <= 3 * (65536 / kThreads / 8 * 8));
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

  // Addresses in shared memory: q, tiles of K and of V, their scales.
  struct Places {
    uint32_t q;
    __device__ uint32_t tile(bool is_v, int stage) const {
      return q + kQParts * kQPartBytes + ((is_v ? kStages : 0) + stage) * kTileBytes;
    }
    __device__ uint32_t scales(bool is_v, int stage) const {
      return tile(false, 2 * kStages) + (is_v ? kStages * kKScaleBytes + stage * kVScaleBytes : stage * kKScaleBytes);
    }
  };
  static constexpr int kStateStride = kVDim + (40 - kVDim % 32) % 32;  // rows 8 banks apart
  static constexpr int kStateFloats = kRows * (kStateStride + 2);
  static constexpr int kUsedBytes = kQParts * kQPartBytes + kStages * (2 * kTileBytes + kKScaleBytes + kVScaleBytes);
  static constexpr int kSharedBytes = 1024 + (kUsedBytes > 4 * kStateFloats ? kUsedBytes : 4 * kStateFloats);
  static constexpr int kBlocks = 1;
  __device__ static void sync() { sync_threads(kSyncAll, 32 * kWarps); }
  static constexpr int kSyncAll = 1, kOwn = 4;  // barriers; of the last each warpgroup has one
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

// Products that are under way: of a group of dims and of the next, or all, where there are no groups.
template <class Shape>
using Sums = float[Shape::kKScales > 0 ? 2 : 1][Shape::kTileKeys / 2];

// A tile of K and the rows of q, as products read them, and where K's scales are for this thread.
struct KeysView {
  uint64_t q, k;
  uint32_t scales;
};

// sums = q k over the dims of steps [kFirst, kEnd), 16 each.
template <class Shape, int kParts, int kFirst, int kEnd>
__device__ inline void multiply_steps(const KeysView& view, float (&sums)[Shape::kTileKeys / 2]) {
  begin_products();
#pragma unroll
  for (int p = 0; p < kParts; ++p)
#pragma unroll
    for (int j = kFirst; j < kEnd; ++j)
      Wgmma<Half, Shape::kTileKeys>::keys(
          sums, advance(view.q, p * Shape::kQPartBytes + j / 4 * (Shape::kRows * 128) + j % 4 * 32),
          advance(view.k, j / 4 * (Shape::kTileKeys * 128) + j % 4 * 32), p > 0 || j > kFirst);
  commit_products();
}

// Of a group, of the keys that a thread has.
template <class Shape>
struct GroupScales {
  float4 of[Shape::kTileKeys / 16];

  __device__ void load(const KeysView& view, int group) {
#pragma unroll
    for (int i = 0; i < Shape::kTileKeys / 16; ++i)
      of[i] = load_floats(view.scales + Shape::KPlaces::of_thread(group, 0) + 16 * i);
  }
};

// s += scales times a group's sums, or is that.
template <class Shape>
__device__ inline void add_group(const GroupScales<Shape>& scales, bool is_first, const float (&sums)[Shape::kTileKeys / 2],
                                 float (&s)[Shape::kTileKeys / 2]) {
#pragma unroll
  for (int n = 0; n < Shape::kTileKeys / 16; ++n) {
    const float scale[4] = {scales.of[n].x, scales.of[n].y, scales.of[n].z, scales.of[n].w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float factor = scale[i / 4 * 2 + i % 2];
      s[8 * n + i] = is_first ? factor * sums[8 * n + i] : fmaf(factor, sums[8 * n + i], s[8 * n + i]);
    }
  }
}

// Scales are on their way while products are waited for. The first group's have been.
template <class Shape, int kParts, int kGroup>
__device__ inline void multiply_groups(const KeysView& view, Sums<Shape>& sums, float (&s)[Shape::kTileKeys / 2]) {
  constexpr int kSteps = Shape::kDim / 16, kNext = 2 * kGroup + 2;
  GroupScales<Shape> scales;
  scales.load(view, kGroup);
  if constexpr (kNext < kSteps)
    multiply_steps<Shape, kParts, kNext, (kNext + 2 < kSteps ? kNext + 2 : kSteps)>(view, sums[(kGroup + 1) % 2]);
  if constexpr (kGroup > 0) {
    wait_for_products<(kNext < kSteps)>();
    pin(sums[kGroup % 2]);
  }
  add_group<Shape>(scales, kGroup == 0, sums[kGroup % 2], s);
  if constexpr (kNext < kSteps) multiply_groups<Shape, kParts, kGroup + 1>(view, sums, s);
}

template <class Shape, int kParts>
__device__ inline void begin_keys(const KeysView& view, Sums<Shape>& sums) {
  multiply_steps<Shape, kParts, 0, (Shape::kKScales > 0 ? 2 : Shape::kDim / 16)>(view, sums[0]);
}

template <class Shape, int kParts>
__device__ inline void finish_keys(const KeysView& view, Sums<Shape>& sums, float (&s)[Shape::kTileKeys / 2]) {
  wait_for_products<0>();
  pin(sums[0]);
  if constexpr (Shape::kKScales > 0) {
    multiply_groups<Shape, kParts, 0>(view, sums, s);
  } else {
#pragma unroll
    for (int i = 0; i < Shape::kTileKeys / 2; ++i) s[i] = sums[0][i];
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

// kScaled: times scales of their keys, pairs of f16.
template <class Shape, bool kScaled>
__device__ inline void split_weights(const float (&s)[Shape::kTileKeys / 2], const float4 (&scales)[Shape::kTileKeys / 32],
                                     Weights<Shape>& p) {
#pragma unroll
  for (int n = 0; n < Shape::kTileKeys / 8; ++n) {
    const float4& four = scales[n / 4];
    const float pairs[4] = {four.x, four.y, four.z, four.w};
    const float2 scale = kScaled ? Half::unpack(__float_as_uint(pairs[n % 4])) : make_float2(1.0f, 1.0f);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t parts[2];
      split<typename Shape::Number>(s[4 * n + 2 * i] * scale.x, s[4 * n + 2 * i + 1] * scale.y, parts);
      p[n / 2][0][n % 2 * 2 + i] = parts[0], p[n / 2][1][n % 2 * 2 + i] = parts[1];
    }
  }
}

// Of a group, of the keys that a thread has: pairs of f16.
template <class Shape>
struct ValueScales {
  float4 of[Shape::kTileKeys / 32];

  __device__ void load(uint32_t scales, int group) {
#pragma unroll
    for (int i = 0; i < Shape::kTileKeys / 32; ++i)
      of[i] = load_floats(scales + Shape::VPlaces::of_thread(group, threadIdx.x % 4) + 16 * i);
  }
};

// o += weights times kWidth columns of V.
template <class Shape, int kWidth>
__device__ inline void multiply_columns(const Weights<Shape>& p, uint64_t v, float (&o)[kWidth / 2]) {
  begin_products();
#pragma unroll
  for (int j = 0; j < Shape::kTileKeys / 16; ++j)
#pragma unroll
    for (int part = 0; part < 2; ++part) Wgmma<typename Shape::Number, kWidth>::values(o, p[j][part], advance(v, j * 2048));
  commit_products();
}

// scales: of this group.
template <class Shape, int kGroup>
__device__ inline void multiply_value_groups(uint64_t v, uint32_t at, const ValueScales<Shape>& scales,
                                             const float (&s)[Shape::kTileKeys / 2], Weights<Shape> (&p)[2],
                                             GroupSums<Shape>& state) {
  constexpr int kFirst = 32 * kGroup, kWidth = Shape::kVDim - kFirst < 32 ? Shape::kVDim - kFirst : 32;
  ValueScales<Shape> next;
  if constexpr (kFirst + 32 < Shape::kVDim) next.load(at, kGroup + 1);
  if constexpr (kGroup >= 2) wait_for_products<1>();
  split_weights<Shape, true>(s, scales.of, p[kGroup % 2]);
  multiply_columns<Shape, kWidth>(p[kGroup % 2], advance(v, kGroup / 2 * (Shape::kTileKeys * 128) + kGroup % 2 * 64),
                                  reinterpret_cast<float(&)[kWidth / 2]>(state.o[kFirst / 2]));
  if constexpr (kFirst + 32 < Shape::kVDim) multiply_value_groups<Shape, kGroup + 1>(v, at, next, s, p, state);
}

// Of weights s. p: room for two groups' summands. Leaves products under way. scales: of the first group.
template <class Shape>
__device__ inline void add_values(uint64_t v, uint32_t at, const ValueScales<Shape>& scales,
                                  const float (&s)[Shape::kTileKeys / 2], Weights<Shape> (&p)[2], GroupSums<Shape>& state) {
  if constexpr (Shape::kVScales > 0) {
    multiply_value_groups<Shape, 0>(v, at, scales, s, p, state);
  } else {
    split_weights<Shape, false>(s, scales.of, p[0]);
    multiply_columns<Shape, Shape::kVDim>(p[0], v, state.o);
  }
}

// ---- the kernel --------------------------------------------------------------------------------------------------------

// A warpgroup's way through the tiles: the next tile's first products are under way behind this one's last. kParts: summands
// of q; row_scale: of q.
template <class Shape, int kParts>
__device__ inline void attend_codes(const PrefillCall& call, const PrefillItem& item, const typename Shape::Places& places,
                                    TileBarriers<Shape> barriers, const float (&row_scale)[2], GroupSums<Shape>& state) {
  const int group = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4, n_tiles = item.end_tile - item.first_tile;
  if (n_tiles <= 0) return;
  const RowKeys keys[2] = {keys_of_row(call, item, row), keys_of_row(call, item, row + 8)};
  const auto wait_full = [&](bool is_v, int n) {  // who writes has fenced
    wait_barrier(barriers.full(is_v, n % Shape::kStages), n / Shape::kStages % 2);
  };
  const auto release = [&](bool is_v, int n) {
    __syncwarp();  // lanes have read scales
    if (lane == 0) arrive(barriers.free(is_v, n % Shape::kStages));
  };
  const auto view_keys = [&](int n) {
    const int stage = n % Shape::kStages;
    return KeysView{describe_matrix(places.q + group * 64 * 128, 16), describe_matrix(places.tile(false, stage), 16),
                    places.scales(false, stage) + Shape::KPlaces::of_thread(0, lane % 4)};
  };
  Sums<Shape> sums;
  wait_full(false, 0);
  begin_keys<Shape, kParts>(view_keys(0), sums);
  for (int n = 0; n < n_tiles; ++n) {
    const int stage = n % Shape::kStages, base = (item.first_tile + n) * Shape::kTileKeys;
    float s[Shape::kTileKeys / 2], faded[2];
    float scale[2] = {row_scale[0] * logit_scale(call), row_scale[1] * logit_scale(call)};
    finish_keys<Shape, kParts>(view_keys(n), sums, s);
    release(false, n);
    if (call.soft_cap > 0.0f) cap<Shape>(call, scale, s);
    if (base < item.common_lo || base + Shape::kTileKeys > item.common_hi) mask_tile<Shape>(keys, base, s);
    weigh<Shape>(scale, s, state, faded);
    wait_full(true, n);
    ValueScales<Shape> scales;
    if constexpr (Shape::kVScales > 0) scales.load(places.scales(true, stage), 0);
    fade<Shape>(faded, state);
    Weights<Shape> p[2];
    add_values<Shape>(describe_matrix(places.tile(true, stage), Shape::kTileKeys * 128), places.scales(true, stage), scales,
                      s, p, state);
    const int next = min(n + 1, n_tiles - 1);  // the last once more: a branch would make products wait for each other
    wait_full(false, next);
    begin_keys<Shape, kParts>(view_keys(next), sums);
    wait_for_products<1>();
    pin(state.o);
    release(true, n);
  }
  wait_for_products<0>();
  pin(sums[0]);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) prefill_codes_kernel(const __grid_constant__ PrefillCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ __align__(8) uint64_t barrier_words[kBarriersOfStage * Shape::kStages];
  __shared__ int is_last;
  const PrefillItem item = find_item<Shape>(call);
  if (item.piece.n_rows == 0) return;
  std::byte* const aligned = shared + (1024 - shared_address(shared) % 1024) % 1024;
  const typename Shape::Places places{shared_address(aligned)};
  const TileBarriers<Shape> barriers{shared_address(barrier_words)};
  if (threadIdx.x == 0) init_barriers(barriers);
  __syncthreads();
  if (threadIdx.x >= 256) {
    give_registers<Shape::kConverterRegisters>();
    convert_tiles<Shape>(call, item, places, barriers);
  } else {
    take_registers<Shape::kMultiplierRegisters>();
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
