// SPDX-License-Identifier: MIT
// The compile-time sizes of a decode kernel for compute capability 9.0 (decode_sm90.cuh), and its queries in shared memory.
#pragma once

#include "cuda/kernels/decode_work.cuh"
#include "cuda/kernels/query_rows.cuh"
#include "cuda/kernels/stored_panels.cuh"

namespace tandem::cuda {

__host__ __device__ constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

// The compile-time sizes of a kernel: 16, 8 or 4 query rows (decode_sm90_few.cuh).
template <class K_, class V_, int kKDim_, int kVDim_, int kRows_>
struct DecodeSm90Shape {
  using K = K_;
  using V = V_;
  static constexpr int kKDim = kKDim_, kVDim = kVDim_, kRows = kRows_, kTiles = (kRows + 7) / 8;
  static constexpr bool kHasLists = false;
  static constexpr bool kIsFew = kRows == 4;
  static constexpr bool kIsLong = kIsFew && K::kBits < 8 && kKDim + kVDim <= 256;  // has long units
  static constexpr int kKeys = kIsLong ? 64 : K::kBits < 16 ? 32 : 16, kUnitKeys = kKeys;
  using KRows = Panels<kKDim * K::kBits / 8, kKeys>;
  using VRows = Panels<kVDim * V::kBits / 8, kKeys>;
  static constexpr int kKSteps = round_up((kKDim + 15) / 16, K::kRound), kVSteps = round_up((kVDim + 15) / 16, V::kRound);
  static constexpr int kKScales = K::kGroup > 0 ? (kKDim + 31) / 32 : 0, kVScales = V::kGroup > 0 ? (kVDim + 31) / 32 : 0;
  static constexpr int kQParts = K::KeyNumber::kNarrow ? 2 : 3, kPParts = 2;
  static constexpr int kQuads = kTiles == 2 ? kQParts : (kQParts + 1) / 2;  // fragments of q for a step

  static constexpr int kBoxBytes = KRows::kBytes + VRows::kBytes, kScaleBytes = 2 * kKeys * (kKScales + kVScales);
  static constexpr int kStageBytes = kBoxBytes + kScaleBytes;
  static_assert(!kIsFew || kQParts == 2);
  static constexpr int kQBytes = kQuads * kKSteps * (kIsFew ? 256 : 512);
  static constexpr int kScaledBytes = kIsFew ? 0 : 64 * kVScales;  // bytes of a warp's scaled scales of V
  static constexpr int kRoom = 227 * 1024 - kQBytes - 2048 - 16 * kScaledBytes;
  // Conversions take instructions. More warps hide more of their waits, as long as each warp has three units in flight.
  // Otherwise longer pipelines hide more.
  static constexpr int kMostWarps = kIsLong ? (36 * kStageBytes <= kRoom ? 12 : 8) : K::kBits < 8 ? 16 : 8;
  static constexpr int kWarps = 2 * kMostWarps * kStageBytes <= kRoom ? kMostWarps : 16 * kStageBytes <= kRoom ? 8 : 4;
  static constexpr int kFit = kRoom / (kWarps * kStageBytes), kMostStages = K::kBits < 16 ? 4 : 2;
  static constexpr int kStages = kFit < kMostStages ? kFit : kMostStages;
  static_assert(kStages >= 2);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kLeastUnits = kWarps / 2, kPieceUnits = 2 * kWarps, kRoundUnits = 16 * kWarps;

  // States: o, then m and l of each row. The states of warps lie in the place of the pipeline, with rows 4 banks apart.
  static constexpr int kStateStride = kVDim, kStateFloats = kRows * (kVDim + 2);
  static constexpr int kWarpStride = kVDim + 4, kWarpFloats = kRows * (kWarpStride + 2);
  static constexpr int kStagesBytes = kWarps * kStages * kBoxBytes;
  static constexpr int kPipelineBytes =
      round_up(kStagesBytes > 4 * kWarps * kWarpFloats ? kStagesBytes : 4 * kWarps * kWarpFloats, 128);
  static constexpr int kScalesAt = kPipelineBytes, kQAt = kScalesAt + kWarps * kStages * kScaleBytes;
  static constexpr int kScaledAt = kQAt + kQBytes, kSharedBytes = kScaledAt + kWarps * kScaledBytes;
};

// ---- queries -----------------------------------------------------------------------------------------------------------

// q in shared memory: fragments [kQuads][kKSteps][32] (for few rows [kKSteps / 2][32]), and the factors from products to
// logits in units of ln 2 (without a soft cap).
struct StagedQueries {
  uint4* fragments;
  float* scale;  // [kRows]
};

template <class Shape>
inline constexpr int kQueryItems = (4 * Shape::kKSteps + 31) / 32;  // a lane's items of four numbers

template <class Shape, class T>
__device__ inline void load_row(const DecodeCall& call, const Piece& piece, int r, float (&x)[kQueryItems<Shape>][4]) {
  const bool is_row = r < piece.n_rows;
  const T* from = static_cast<const T*>(call.q.data) +
                  (is_row ? row_offset(call, piece, r, call.q.token_stride, call.q.head_stride) : 0);
#pragma unroll
  for (int k = 0; k < kQueryItems<Shape>; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int item = threadIdx.x % 32 + 32 * k, dim = Shape::K::key_dim(item / 4, item % 4, i);
      x[k][i] = is_row && item < 4 * Shape::kKSteps && dim < Shape::kKDim ? static_cast<float>(from[dim]) : 0.0f;
    }
}

// Writes a lane's numbers of a row in the order of fragments.
template <class Shape>
__device__ inline void stage_row(int r, const float (&x)[kQueryItems<Shape>][4], const StagedQueries& staged) {
  using K = typename Shape::K;
  using Number = typename K::KeyNumber;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kQueryItems<Shape>; ++k) {
    const int item = lane + 32 * k, j = item / 4;
    uint32_t low[4] = {}, high[4] = {};  // kQParts of them; the fourth is 0
    uint32_t(&low_parts)[Shape::kQParts] = reinterpret_cast<uint32_t(&)[Shape::kQParts]>(low);
    uint32_t(&high_parts)[Shape::kQParts] = reinterpret_cast<uint32_t(&)[Shape::kQParts]>(high);
    split<Number>(x[k][0] * K::key_factor(0), x[k][1] * K::key_factor(1), low_parts);
    split<Number>(x[k][2] * K::key_factor(2), x[k][3] * K::key_factor(3), high_parts);
    if (item >= 4 * Shape::kKSteps) continue;
    if constexpr (Shape::kIsFew) {  // a column for each part, two steps in a fragment
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint4* const at = staged.fragments + j / 2 * 32 + (2 * r + part) * 4 + item % 4;
        reinterpret_cast<uint2*>(at)[j % 2] = make_uint2(low[part], high[part]);
      }
    } else {
      uint4* const to = staged.fragments + j * 32 + r % 8 * 4 + item % 4;
#pragma unroll
      for (int quad = 0; quad < Shape::kQuads; ++quad) {
        uint4* const at = to + quad * Shape::kKSteps * 32;
        if (Shape::kTiles == 1) {
          *at = make_uint4(low[2 * quad], low[2 * quad + 1], high[2 * quad], high[2 * quad + 1]);
        } else {
          reinterpret_cast<uint32_t*>(at)[r / 8] = low[quad];
          reinterpret_cast<uint32_t*>(at)[2 + r / 8] = high[quad];
        }
      }
    }
  }
}

// The numbers of a warp's rows. Their loads start before those of keys, as otherwise they would arrive after all keys.
template <class Shape>
struct LoadedQueries {
  static constexpr int kOfWarp = (Shape::kRows + Shape::kWarps - 1) / Shape::kWarps;
  float x[kOfWarp][kQueryItems<Shape>][4];

  __device__ static int row(int i) { return static_cast<int>(threadIdx.x / 32) + i * Shape::kWarps; }
  template <class T>
  __device__ void load_as(const DecodeCall& call, const Piece& piece) {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) load_row<Shape, T>(call, piece, row(i), x[i]);
  }
  __device__ void load(const DecodeCall& call, const Piece& piece) {
    if (call.q.dtype == TANDEM_BF16)
      load_as<__nv_bfloat16>(call, piece);
    else if (call.q.dtype == TANDEM_F16)
      load_as<__half>(call, piece);
    else
      load_as<float>(call, piece);
  }
};

template <class Shape>
__device__ void stage_queries(const DecodeCall& call, LoadedQueries<Shape>& loaded, const StagedQueries& staged) {
  using Loaded = LoadedQueries<Shape>;
#pragma unroll
  for (int n = 0; n < Loaded::kOfWarp; ++n) {
    const int r = Loaded::row(n);
    if (r >= Shape::kRows) break;
    float(&x)[kQueryItems<Shape>][4] = loaded.x[n];
    int exponent = 0;
    if (Shape::K::KeyNumber::kNarrow) {
      float largest = 0.0f;
#pragma unroll
      for (int k = 0; k < kQueryItems<Shape>; ++k)
        for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(x[k][i]));
      for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
      exponent = to_range(largest);
#pragma unroll
      for (int k = 0; k < kQueryItems<Shape>; ++k)
        for (int i = 0; i < 4; ++i) x[k][i] *= power_of_two(exponent);
    }
    if (threadIdx.x % 32 == 0)
      staged.scale[r] = power_of_two(-exponent) * call.sm_scale * (call.soft_cap > 0.0f ? 1.0f : kLog2E);
    stage_row<Shape>(r, x, staged);
  }
}

}  // namespace tandem::cuda
