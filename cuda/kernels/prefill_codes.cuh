// SPDX-License-Identifier: MIT
// Attention of many queries of 16 bits for compute capability 9.0, over K and V in 4 and 8 bits. Products and softmax are
// those of prefill_sm90.cuh. Further warpgroups convert the tiles to f16 (prefill_convert.cuh).
//
// Queries are f16, scaled into its range row by row, and keep their bits. K's numbers keep theirs as sums of two f16.
// Weights and V's numbers are rounded to f16.
#pragma once

#include <type_traits>

#include "cuda/kernels/prefill_convert.cuh"
#include "cuda/kernels/round.cuh"

namespace tandem::cuda {

// Tiles are as long as shared memory allows. Where both K and V have scales and 8 bits, converting takes as long as
// multiplying. Then K and V have a warpgroup each, and tiles are shorter, so that there are four stages.
template <class K, class V, int kDim>
struct CodesTile {
  static constexpr int kKParts = K::kGroup > 0 ? 2 : 1;
  static constexpr bool kAreBoth8 = std::is_same_v<K, StoredQ8> && std::is_same_v<V, StoredQ8> && kDim <= 128;
  static constexpr int kKeys = kAreBoth8 ? 64 : kDim <= 128 ? 128 : kDim <= 192 || kKParts == 1 ? 64 : 32;
  static constexpr int kStages = kAreBoth8 ? 4 : 2, kConverters = kAreBoth8 ? 2 : 1;
};

template <class K_, class V_, int kDim_, class Tile = CodesTile<K_, V_, kDim_>>
struct CodesShape : GroupsShape<kDim_, Tile::kKeys, Tile::kKParts, Tile::kStages> {
  using K = K_;
  using V = V_;
  using Number = Half;  // the type of all products
  static constexpr bool kFencesTiles = true;
  static constexpr float kTilesOfMerge = kTilesOfMerge128 / 2;  // a tile takes up to twice as long as a tile of 16 bits
  static constexpr int kUnitKeys = CodesShape::kTileKeys < 64 ? CodesShape::kTileKeys : 64;
  static constexpr int kConverters = Tile::kConverters, kThreads = 256 + 128 * kConverters;
  // Registers of a thread that multiplies and of one that converts. With more than a block starts with, it would wait for
  // ever.
  static constexpr int kMultiplierRegisters = kConverters == 2 ? 160 : 192;
  static constexpr int kConverterRegisters = kConverters == 2 ? 96 : 120;
  static_assert(2 * kMultiplierRegisters + kConverters * kConverterRegisters <=
                (2 + kConverters) * (65536 / kThreads / 8 * 8));
};

template <class Shape>
struct GroupRegisters {
  static constexpr int kMultiplier = Shape::kMultiplierRegisters, kConverter = Shape::kConverterRegisters;
};
// Lists of tiles take registers of the warps that multiply. Without room they would go to local memory, which every tile of
// keys pushes out of the cache.
template <class Shape>
struct GroupRegisters<WithTiles<Shape>> {
  static constexpr int kMoved = Shape::kConverters == 2 ? 8 : 0;
  static constexpr int kMultiplier = Shape::kMultiplierRegisters + kMoved;
  static constexpr int kConverter = Shape::kConverterRegisters - kMoved;
};

// Brings a warp's 16 rows as f16: [blocks of 64 dims][128 rows]. scale: undoes the scaling of rows g and g + 8 into the
// range of f16.
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
        for (int k = 0; k < kLaneNumbers; ++k) x[j][k] *= power_of_two(exponent);
        store_words(q + first_of_four(j) / 64 * (Shape::kRows * 128) + swizzled(row, first_of_four(j) % 64 / 8) +
                        first_of_four(j) % 8 * 2,
                    Half::pack(x[j][0], x[j][1]), Half::pack(x[j][2], x[j][3]));
      }
    }
  }
  fence_products();
  sync_threads(Shape::kOwn + static_cast<int>(threadIdx.x) / 128, 128);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) prefill_codes_kernel(const __grid_constant__ PrefillCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ __align__(8) uint64_t barrier_words[kBarriersOfStage * Shape::kStages];
  let_next_kernel_start();
  const bool finds_late = call.lists.are_written_by_kernels != 0;
  if (finds_late) wait_for_rows(call);
  const PrefillItem item = find_item<Shape>(call);
  if (!finds_late) wait_for_rows(call);
  if (item.piece.n_rows == 0) return wait_for_append(call);
  std::byte* const aligned = shared + (1024 - shared_address(shared) % 1024) % 1024;
  const uint32_t q = shared_address(aligned);
  const TileBarriers<Shape> barriers{shared_address(barrier_words)};
  if (threadIdx.x == 0) init_barriers(barriers);
  __syncthreads();
  if (threadIdx.x >= 256) {
    give_registers<GroupRegisters<Shape>::kConverter>();
    convert_tiles<Shape>(call, item, q + Shape::kQBytes, barriers);
  } else {
    take_registers<GroupRegisters<Shape>::kMultiplier>();
    float scale[2];
    bring_rows<Shape>(call, item.piece, q, scale);
    for (float& x : scale) x *= logit_scale(call);
    GroupState<Shape> state;
    state.clear();
    attend_tiles<Shape>(call, item, q, barriers, scale, state);
    finish_group<Shape>(call, item, state, aligned);
    wait_for_append(call);  // not the other warps: warps that have ended do not hold up the barriers of a cluster
  }
#endif
}

}  // namespace tandem::cuda
