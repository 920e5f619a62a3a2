// SPDX-License-Identifier: MIT
// States of the decode kernel for compute capability 9.0 (decode_sm90.cuh): of a warp, of a block, of an item.
#pragma once

#include "cuda/kernels/decode_sm90_shape.cuh"
#include "cuda/kernels/far_weights.cuh"

namespace tandem::cuda {

// A lane's part of its warp's state: m and l of row g of each tile, where l sums the lane's own keys only, and o of rows 2
// t, 2 t + 1 and dims value_dim(b, g), (b, g + 8). For few rows (decode_sm90_few.cuh): m and l of row t, and o of columns 2
// t, 2 t + 1.
template <class Shape>
struct RowState {
  float o[Shape::kTiles][Shape::kVSteps][4];
  float m[Shape::kTiles], l[Shape::kTiles];
  int exponent;  // o is in units of 2^exponent
  // A lower bound of the magnitudes of the lane's sums, and the bound from which the warp need not be careful
  // (decode_sm90_far.cuh).
  float least, enough;
  bool is_careful;
};

template <class Shape>
using Logits = float[Shape::kTiles][Shape::kKeys / 8][2];  // logits of row g of each tile
template <class Shape>
using FewLogits = float[Shape::kKeys / 8];  // logits of row t, keys 8 n + key_of(g)

template <class Shape>
__device__ inline void clear(RowState<Shape>& state) {
  state.exponent = Shape::kVScales > 0 ? -26 : 0;  // less than the exponent of any scale
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n) {
    state.m[n] = -INFINITY, state.l[n] = 0.0f;
    for (int b = 0; b < Shape::kVSteps; ++b)
      for (int i = 0; i < 4; ++i) state.o[n][b][i] = 0.0f;
  }
}

// Calls f(block, i, a) for every 16 dims of a unit's values. Their fragments are a[k][i]. row: the lane's value_row().
template <class Shape, class F>
__device__ inline void for_values(uint32_t row, F f) {
  using V = typename Shape::V;
#pragma unroll
  for (int first = 0; first < Shape::kVSteps; first += V::kValueSteps) {
    uint32_t a[Shape::kKeys / 16][V::kValueSteps][4];
    V::template values<typename Shape::VRows>(a, row, first);
#pragma unroll
    for (int i = 0; i < V::kValueSteps; ++i)
      if (first + i < Shape::kVSteps) f(first + i, i, a);
  }
}

// The error of a key's f16 weight, at most 2^-24, times V's largest number, divided by the allowed error of a sum.
template <class V>
inline constexpr float kEnoughOfKey = V::kBits == 4   ? 0x1p-6f
                                      : V::kGroup > 0 ? 0x1p-2f
                                      : V::kBits == 8 ? 0x1p-11f
                                                      : 2.0f;

// Sets the number of keys that a cleared state will get.
template <class Shape>
__device__ inline void expect_keys(int n_keys, RowState<Shape>& state) {
  state.least = 0.0f;
  state.enough = kEnoughOfKey<typename Shape::V> * static_cast<float>(n_keys);
  state.is_careful = kHasFar<typename Shape::V>;
}

// Updates the lower bound after all sums were multiplied by `by` or more.
template <class Shape>
__device__ inline void fade_least(float by, RowState<Shape>& state) {
  if constexpr (kHasFar<typename Shape::V>) {
    state.least *= by;
    state.is_careful = __any_sync(~0u, !(state.least >= state.enough));
  }
}

// Stores a warp's state to shared memory: o [kRows][kWarpStride], then m and l [kRows].
template <class Shape>
__device__ void store_state(const RowState<Shape>& state, float* to) {
  using V = typename Shape::V;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float l_factor = power_of_two(-V::kShift), o_factor = power_of_two(state.exponent - V::kShift);
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n) {
    float l = state.l[n];
    for (int mask = 1; mask < 4; mask *= 2) l += __shfl_xor_sync(~0u, l, mask);
    if (t == 0)
      reinterpret_cast<float2*>(to + Shape::kRows * Shape::kWarpStride)[8 * n + g] = make_float2(state.m[n], l * l_factor);
#pragma unroll
    for (int b = 0; b < Shape::kVSteps; ++b)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int dim = V::value_dim(b, g + 8 * half);
          const float x = state.o[n][b][i + 2 * half] * V::value_factor(8 * half);
          if (dim < Shape::kVDim) to[(8 * n + 2 * t + i) * Shape::kWarpStride + dim] = x * o_factor;
        }
      }
  }
}

// For few rows: adds both summands of o.
template <class Shape>
requires(Shape::kIsFew) __device__ void store_state(const RowState<Shape>& state, float* to) {
  using V = typename Shape::V;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float l_factor = power_of_two(-V::kShift), o_factor = power_of_two(state.exponent - V::kShift);
  float l = state.l[0];
  for (int mask = 4; mask < 32; mask *= 2) l += __shfl_xor_sync(~0u, l, mask);
  if (g == 0) reinterpret_cast<float2*>(to + Shape::kRows * Shape::kWarpStride)[t] = make_float2(state.m[0], l * l_factor);
#pragma unroll
  for (int b = 0; b < Shape::kVSteps; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int dim = V::value_dim(b, g + 8 * half);
      const float x = (state.o[0][b][2 * half] + state.o[0][b][2 * half + 1]) * V::value_factor(8 * half);
      if (dim < Shape::kVDim) to[t * Shape::kWarpStride + dim] = x * o_factor;
    }
}

// A row of a state. A lane has dims 4 lane to 4 lane + 3, and the same 128 dims further.
template <class Shape>
struct MergedRow {
  static constexpr int kOfLane = (Shape::kVDim + 127) / 128;
  float4 o[kOfLane];
  float m, l;
};

// n states that are merged. From the second on they lie `apart` floats apart. Rows of o lie `stride` floats apart.
struct StatesToMerge {
  const float *first, *second;
  int n, apart, stride;
};

// Merges states into one, a warp per row, and calls out(r, row) for every row. kAtOnce states are loaded at once, weights
// included, as loads take most of the time.
template <class Shape, class Out>
__device__ void merge_rows(const StatesToMerge& states, int n_rows, Out out) {
  using Row = MergedRow<Shape>;
  constexpr int kAtOnce = 16 / Row::kOfLane;
  const int lane = threadIdx.x % 32, rest_at = Shape::kRows * states.stride;
#pragma unroll 1
  for (int r = threadIdx.x / 32; r < n_rows; r += Shape::kWarps) {
    Row row = {{}, -INFINITY, 0.0f};
#pragma unroll 1
    for (int base = 0; base < states.n; base += kAtOnce) {
      const int n = min(kAtOnce, states.n - base);
      const auto at = [&](int i) {
        return base + i == 0 ? states.first : states.second + static_cast<int64_t>(base + i - 1) * states.apart;
      };
      float2 rest = make_float2(-INFINITY, 0.0f);
      if (lane < n) rest = reinterpret_cast<const float2*>(at(lane) + rest_at)[r];
      const float* const zeroth = at(0) + r * states.stride + 4 * lane;
      const float* next = at(1) + r * states.stride + 4 * lane;
      float4 x[kAtOnce][Row::kOfLane];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float* const from = i == 0 ? zeroth : next;
#pragma unroll
        for (int k = 0; k < Row::kOfLane; ++k) {
          x[i][k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (i < n && 4 * lane + 128 * k < Shape::kVDim) x[i][k] = *reinterpret_cast<const float4*>(from + 128 * k);
        }
        if (i > 0) next += states.apart;
      }
      float m = rest.x;
      for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, mask));
      m = fmaxf(m, row.m);
      const float own = rest.x == -INFINITY ? 0.0f : exp2_fast(rest.x - m);
      const float faded = row.m == -INFINITY ? 0.0f : exp2_fast(row.m - m);
      row.m = m;
      row.l = row.l * faded + own * rest.y;
#pragma unroll
      for (int k = 0; k < Row::kOfLane; ++k) fade(row.o[k], faded);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = __shfl_sync(~0u, own, i);
#pragma unroll
        for (int k = 0; k < Row::kOfLane; ++k)
          if (weight != 0.0f) add(row.o[k], weight, x[i][k]);
      }
    }
    for (int mask = 16; mask > 0; mask /= 2) row.l += __shfl_xor_sync(~0u, row.l, mask);
    out(r, row);
  }
}

// Writes a finished row.
template <class Shape>
__device__ void write_row(const DecodeCall& call, const Piece& piece, int r, const MergedRow<Shape>& row) {
  const int lane = threadIdx.x % 32;
  const DeviceOutput out = output_of(call, piece);
  const RowEnd end = end_row(call, piece, r, row.m, row.l, 0);
  const int64_t at = row_offset(call, piece, r, out.o.token_stride, out.o.head_stride) + 4 * lane;
#pragma unroll
  for (int k = 0; k < MergedRow<Shape>::kOfLane; ++k)
    if (4 * lane + 128 * k < Shape::kVDim) {
      float x[4] = {row.o[k].x, row.o[k].y, row.o[k].z, row.o[k].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = end.factor == 0.0f ? 0.0f : x[i] * end.factor;
      store_numbers(out.o.data, out.o.dtype, at + 128 * k, x);
    }
  if (lane == 0 && out.lse != nullptr)
    out.lse[row_offset(call, piece, r, out.lse_token_stride, out.lse_head_stride)] = end.lse;
}

// Stores a merged row to a state in memory: o [kRows][kStateStride], then m and l [kRows].
template <class Shape>
__device__ inline void store_row(float* state, int r, const MergedRow<Shape>& row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < MergedRow<Shape>::kOfLane; ++k)
    if (4 * lane + 128 * k < Shape::kVDim)
      reinterpret_cast<float4*>(state + r * Shape::kStateStride)[lane + 32 * k] = row.o[k];
  if (lane == 0) reinterpret_cast<float2*>(state + Shape::kRows * Shape::kStateStride)[r] = make_float2(row.m, row.l);
}

// Counts a state that the block has left in memory. Returns true if it is the last of n.
__device__ inline bool is_last_of(int32_t* count, int n, int* is_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    *is_last = add_in_order(count, 1) == n - 1;
    if (*is_last) *count = 0;
  }
  __syncthreads();
  return *is_last != 0;
}

// The states of an item's blocks in memory. A piece that does not begin its item is its block's first piece. A piece that
// begins an item of several pieces is its block's last.
template <class Shape>
struct ItemStates {
  float* states;
  int first_block, n;

  __device__ float* at(int i) const { return states + (2 * (first_block + i) + (i == 0 ? 1 : 0)) * Shape::kStateFloats; }
  // Returns n of the states: every step-th from the i-th on.
  __device__ StatesToMerge some(int i, int step, int n) const {
    return {at(i), at(i + step), n, 2 * step * Shape::kStateFloats, Shape::kStateStride};
  }
};

// Merges the states of the block's warps into the output. Where the piece is one of several, merges them into a state in
// memory, and the last block of the item merges all of these into the output. An item with more states than a block loads
// at once is first merged in groups, as otherwise its last block would load one batch of states after another. All rounds
// share one loop: a kernel runs this once, and fetches its code from memory.
template <class Shape>
__device__ void finish_piece(const DecodeCall& call, const Piece& piece, const float* warp_states, int* is_last) {
  constexpr int kMostStates = 32 / MergedRow<Shape>::kOfLane;
  const ItemStates<Shape> states = {call.states, piece.first_block, piece.end_block - piece.first_block};
  const int own = static_cast<int>(blockIdx.x) - piece.first_block;
  const int group_size = states.n > kMostStates ? static_cast<int>(ceilf(sqrtf(static_cast<float>(states.n)))) : 1;
  // A round merges `from` into the item's state `to` or, in the last round, into the output.
  StatesToMerge from = {warp_states, warp_states + Shape::kWarpFloats, Shape::kWarps, Shape::kWarpFloats,
                        Shape::kWarpStride};
  int to = own;
  bool is_last_round = states.n == 1;
#pragma unroll 1
  for (int round = 0;; ++round) {
    merge_rows<Shape>(from, piece.n_rows, [&](int r, const MergedRow<Shape>& row) {
      if (is_last_round)
        write_row<Shape>(call, piece, r, row);
      else
        store_row<Shape>(states.at(to), r, row);  // all lanes have read the row
    });
    if (is_last_round) return;
    int32_t* count = call.counters + piece.item;
    if (round == 0 && group_size > 1) {
      const int group = divide(own, group_size);
      to = group * group_size;
      from = states.some(to, 1, min(group_size, states.n - to));
      count = call.group_counters + piece.first_block + group;
    } else {
      from = states.some(0, group_size, divide(states.n + group_size - 1, group_size));
      is_last_round = true;
    }
    if (!is_last_of(count, from.n, is_last)) return;
  }
}

}  // namespace tandem::cuda
