// SPDX-License-Identifier: MIT
// How the blocks of a prefill kernel finish: they write their rows, or merge the states of an item's blocks first.
//
// Kernels for compute capability 9.0 merge in clusters. The blocks of a cluster share an item; they run at once and read
// each other's shared memory. Block i of n merges rows i, i + n, i + 2 n, ... of all states. An item may have several
// clusters. Then block i of each cluster writes its merged rows to the workspace and counts itself there, and the last of
// these blocks merges the rows of all clusters. The rows are divided so that no single block merges everything: over short
// contexts that would take longer than the attention itself.
#pragma once

#include "cuda/kernels/cluster.cuh"
#include "cuda/kernels/prefill_work.cuh"

namespace tandem::cuda {

// How a row ends that has a state from before: what that is to be multiplied by, too.
struct JoinedEnd {
  RowEnd own;
  float before = 0.0f;
};

__device__ inline JoinedEnd join_row(const PrefillCall& call, const Piece& piece, int r, float m, float l, int shift) {
  const float* const sinks = output_of(call, piece).sinks;
  const int q_head = q_head_of(call, piece, r);
  if (call.before_lse == nullptr) return {end_row(sinks, q_head, m, l, shift)};
  const float before = call.before_lse[state_row(call, piece, r)];
  const bool is_empty = m == -INFINITY && l == 0.0f;
  const float lse = is_empty ? -INFINITY : (m - static_cast<float>(shift)) * kLn2 + logf(l);
  const float sink = sinks == nullptr ? -INFINITY : sinks[q_head];
  const float most = fmaxf(fmaxf(before, lse), sink);
  const auto weight = [&](float x) { return x == -INFINITY ? 0.0f : expf(x - most); };
  const float of_before = weight(before), of_own = weight(lse), sum = of_before + of_own + weight(sink);
  if (sum == 0.0f) return {};
  return {{is_empty ? 0.0f : of_own / sum / l, most + logf(sum)}, of_before / sum};
}

// A state in shared memory into the output. A warp has neighbouring rows; how they end, each lane finds out of one.
template <class Shape, class Number>
__device__ void write_rows(const PrefillCall& call, const Piece& piece, const float* state) {
  constexpr int kRowsOfWarp = Shape::kRows / Shape::kWarps, kAtOnce = 4, kOfLane = (Shape::kVDim + 31) / 32;
  static_assert(kRowsOfWarp <= 32 && kRowsOfWarp % kAtOnce == 0);
  const int lane = threadIdx.x % 32, first = static_cast<int>(threadIdx.x / 32) * kRowsOfWarp, own = first + lane;
  const DeviceOutput out = output_of(call, piece);
  JoinedEnd end;
  int64_t own_at = 0, own_before = 0;
  if (lane < kRowsOfWarp && own < piece.n_rows) {
    const float* rest = state + Shape::kRows * Shape::kStateStride + 2 * own;
    own_before = state_row(call, piece, own);
    end = join_row(call, piece, own, rest[0], rest[1], Shape::Number::kShift);
    own_at = row_offset(call, piece, own, out.o.token_stride, out.o.head_stride);
    if (out.lse != nullptr) out.lse[row_offset(call, piece, own, out.lse_token_stride, out.lse_head_stride)] = end.own.lse;
  }
  const int n_rows = min(kRowsOfWarp, piece.n_rows - first);
  for (int i = 0; i < n_rows; i += kAtOnce) {
    float x[kAtOnce][kOfLane];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {  // all loads before the first store
      const float share = __shfl_sync(~0u, end.before, i + j);
      const float* before = call.before_o + __shfl_sync(~0u, own_before, i + j) * Shape::kVDim;
#pragma unroll
      for (int k = 0; k < kOfLane; ++k)
        x[j][k] = share != 0.0f && lane + 32 * k < Shape::kVDim ? share * before[lane + 32 * k] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float factor = __shfl_sync(~0u, end.own.factor, i + j);
      Number* to = static_cast<Number*>(out.o.data) + __shfl_sync(~0u, own_at, i + j);
      const float* from = state + (first + i + j) * Shape::kStateStride;
#pragma unroll
      for (int k = 0; k < kOfLane; ++k)
        if (const int dim = lane + 32 * k; i + j < n_rows && dim < Shape::kVDim)
          to[dim] = static_cast<Number>(factor == 0.0f ? x[j][k] : fmaf(factor, from[dim], x[j][k]));
    }
  }
}

// As RowWriter.
struct JoinedWriter {
  const PrefillCall* call;
  const Piece* piece;
  int shift;

  template <int kOfLane>
  __device__ void operator()(int r, int dim, const float (&o)[kOfLane], float m, float l) const {
    const int lane = threadIdx.x % 32;
    const int64_t before = state_row(*call, *piece, r);
    const DeviceOutput out = output_of(*call, *piece);
    const JoinedEnd end = join_row(*call, *piece, r, m, l, shift);
    __syncwarp();  // all lanes have read what one is about to write
    const int64_t at = row_offset(*call, *piece, r, out.o.token_stride, out.o.head_stride);
#pragma unroll
    for (int k = 0; k < kOfLane; ++k)
      if (lane + 32 * k < dim) {
        float x = end.own.factor == 0.0f ? 0.0f : o[k] * end.own.factor;
        if (end.before != 0.0f) x = fmaf(end.before, call->before_o[before * dim + lane + 32 * k], x);
        store_number(out.o.data, out.o.dtype, at + lane + 32 * k, x);
      }
    if (lane == 0 && out.lse != nullptr)
      out.lse[row_offset(*call, *piece, r, out.lse_token_stride, out.lse_head_stride)] = end.own.lse;
  }
};

// The block's states into the output: `own` in shared memory where it has all keys of its item, else in the workspace.
template <class Shape>
__device__ void finish_item(const PrefillCall& call, const PrefillItem& item, const float* own) {
  if (call.n_splits == 1) {
    Shape::sync();
    const int32_t dtype = output_of(call, item.piece).o.dtype;
    if (dtype == TANDEM_BF16)
      write_rows<Shape, __nv_bfloat16>(call, item.piece, own);
    else if (dtype == TANDEM_F16)
      write_rows<Shape, __half>(call, item.piece, own);
    else
      write_rows<Shape, float>(call, item.piece, own);
    return;
  }
  __threadfence();
  Shape::sync();
  bool is_last = false;  // told by the barrier itself: nothing of it goes through shared memory
  if (threadIdx.x == 0) {
    is_last = atomicAdd(call.counters + item.piece.item, 1) == call.n_splits - 1;
    if (is_last) call.counters[item.piece.item] = 0;
  }
  if (!Shape::sync_any(is_last)) return;
  __threadfence();
  const float* states = call.states + int64_t{item.piece.item} * call.n_splits * Shape::kStateFloats;
  const JoinedWriter writer{&call, &item.piece, Shape::Number::kShift};
  merge_states<Shape, true>(
      call.n_splits, item.piece.n_rows, [&](int i) { return states + i * Shape::kStateFloats; }, writer);
}

// Some merged rows of a warp. Of each row a lane has dims 4 lane to 4 lane + 3, and those 128 further on.
template <class Shape>
struct MergedRows {
  static constexpr int kOfLane = (Shape::kVDim + 127) / 128, kRows = 4 / kOfLane;
  float4 o[kRows][kOfLane];
  float m[kRows], l[kRows];
  int row[kRows];  // n_rows and beyond: there is none

  __device__ static bool has_dims(int k) { return 4 * static_cast<int>(threadIdx.x % 32) + 128 * k < Shape::kVDim; }

  // x: o of up to kStates states of row j. rest: m and l of state i in lane i, and of an empty state in the other lanes.
  template <int kStates>
  __device__ void include(int j, const float2& rest, const float4 (&x)[kStates][kOfLane]) {
    float most = rest.x;
    for (int mask = 1; mask < kStates; mask *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
    most = fmaxf(m[j], __shfl_sync(~0u, most, 0));
    const float own = rest.x == -INFINITY ? 0.0f : exp2_fast(rest.x - most);
    const float faded = m[j] == -INFINITY ? 0.0f : exp2_fast(m[j] - most);
    float sum = own * rest.y;  // NaN where l is, whatever the weight
    for (int mask = 1; mask < kStates; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    m[j] = most;
    l[j] = l[j] * faded + __shfl_sync(~0u, sum, 0);
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) fade(o[j][k], faded);
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      const float weight = __shfl_sync(~0u, own, i);
#pragma unroll
      for (int k = 0; k < kOfLane; ++k)
        if (weight != 0.0f) add(o[j][k], weight, x[i][k]);
    }
  }
};

// Every step-th of n_rows rows, from `first` on.
struct RowSlice {
  int n_rows, first, step;
};

// Merges n_states states, the i-th at state(i), and calls out(rows) for a few rows of a warp at a time. Loads take most of
// the time, so the loads of several rows and states overlap. Lane i loads m and l of state i.
template <class Shape, bool kGlobal, class StateAt, class Out>
__device__ void merge_slice(int n_states, const RowSlice& slice, StateAt state, Out out) {
  using Rows = MergedRows<Shape>;
  constexpr int kAtOnce = Shape::kStatesAtOnce;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int base = threadIdx.x / 32; slice.first + slice.step * base < slice.n_rows; base += Shape::kWarps * Rows::kRows) {
    Rows rows;
#pragma unroll
    for (int j = 0; j < Rows::kRows; ++j) {
      rows.row[j] = slice.first + slice.step * (base + j * Shape::kWarps);
      rows.m[j] = -INFINITY, rows.l[j] = 0.0f;
      for (int k = 0; k < Rows::kOfLane; ++k) rows.o[j][k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll 1
    for (int first = 0; first < n_states; first += kAtOnce) {
      const int n = min(kAtOnce, n_states - first);
      float2 rest[Rows::kRows];
      float4 x[Rows::kRows][kAtOnce][Rows::kOfLane];
      const float* const of_lane = state(first + min(lane, n - 1)) + Shape::kRows * Shape::kStateStride;
#pragma unroll
      for (int j = 0; j < Rows::kRows; ++j) {
        rest[j] = make_float2(-INFINITY, 0.0f);
        if (lane < n && rows.row[j] < slice.n_rows)
          rest[j] = load_state<kGlobal>(reinterpret_cast<const float2*>(of_lane) + rows.row[j]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float* const from = state(first + min(i, n - 1));
#pragma unroll
        for (int j = 0; j < Rows::kRows; ++j)
#pragma unroll
          for (int k = 0; k < Rows::kOfLane; ++k) {
            x[j][i][k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (i < n && rows.row[j] < slice.n_rows && Rows::has_dims(k))
              x[j][i][k] = load_state<kGlobal>(reinterpret_cast<const float4*>(from + rows.row[j] * Shape::kStateStride) +
                                               lane + 32 * k);
          }
      }
#pragma unroll
      for (int j = 0; j < Rows::kRows; ++j) rows.include(j, rest[j], x[j]);
    }
    out(rows);
  }
}

// Merged rows to a state in the workspace.
template <class Shape>
__device__ inline void store_merged(const MergedRows<Shape>& rows, int n_rows, float* state) {
  using Rows = MergedRows<Shape>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < Rows::kRows; ++j) {
    if (rows.row[j] >= n_rows) continue;
#pragma unroll
    for (int k = 0; k < Rows::kOfLane; ++k)
      if (Rows::has_dims(k))
        reinterpret_cast<float4*>(state + rows.row[j] * Shape::kStateStride)[lane + 32 * k] = rows.o[j][k];
    if (lane == 0)
      reinterpret_cast<float2*>(state + Shape::kRows * Shape::kStateStride)[rows.row[j]] = make_float2(rows.m[j], rows.l[j]);
  }
}

// Merged rows to the output. Lane j finds out how row j ends.
template <class Shape>
__device__ inline void write_merged(const PrefillCall& call, const Piece& piece, const MergedRows<Shape>& rows) {
  using Rows = MergedRows<Shape>;
  const int lane = threadIdx.x % 32;
  const DeviceOutput out = output_of(call, piece);
  int own = piece.n_rows;
  float m = -INFINITY, l = 0.0f;
#pragma unroll
  for (int j = 0; j < Rows::kRows; ++j)
    if (lane == j) own = rows.row[j], m = rows.m[j], l = rows.l[j];
  JoinedEnd end;
  int64_t own_at = 0, own_before = 0;
  if (own < piece.n_rows) {
    end = join_row(call, piece, own, m, l, Shape::Number::kShift);
    own_at = row_offset(call, piece, own, out.o.token_stride, out.o.head_stride);
    own_before = state_row(call, piece, own) * Shape::kVDim;
    if (out.lse != nullptr) out.lse[row_offset(call, piece, own, out.lse_token_stride, out.lse_head_stride)] = end.own.lse;
  }
#pragma unroll
  for (int j = 0; j < Rows::kRows; ++j) {
    const float factor = __shfl_sync(~0u, end.own.factor, j), before = __shfl_sync(~0u, end.before, j);
    const int64_t at = __shfl_sync(~0u, own_at, j) + 4 * lane, from = __shfl_sync(~0u, own_before, j) + 4 * lane;
    if (rows.row[j] >= piece.n_rows) continue;
#pragma unroll
    for (int k = 0; k < Rows::kOfLane; ++k) {
      if (!Rows::has_dims(k)) continue;
      const float x[4] = {rows.o[j][k].x, rows.o[j][k].y, rows.o[j][k].z, rows.o[j][k].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float y = factor == 0.0f ? 0.0f : x[i] * factor;
        if (before != 0.0f) y = fmaf(before, call.before_o[from + 128 * k + i], y);
        store_number(out.o.data, out.o.dtype, at + 128 * k + i, y);
      }
    }
  }
}

// By all threads that multiply, after they have stored the block's states (kKeySplits of them) to shared memory.
template <class Shape>
__device__ void finish_in_cluster(const PrefillCall& call, const PrefillItem& item, const float* own) {
  constexpr int kOfBlock = Shape::kKeySplits;
  const Cluster cluster = this_cluster();
  const int n_clusters = call.n_splits / cluster.n_blocks, split = static_cast<int>(blockIdx.x) % call.n_splits;
  const Piece& piece = item.piece;
  const RowSlice slice = {piece.n_rows, cluster.rank, cluster.n_blocks};
  float* const states = call.states + int64_t{piece.item} * n_clusters * Shape::kStateFloats;
  Shape::sync();
  arrive_in_cluster(cluster);
  wait_for_cluster(cluster);
  merge_slice<Shape, false>(
      cluster.n_blocks * kOfBlock, slice,
      [&](int i) { return shared_of_block(cluster, own + i % kOfBlock * Shape::kStateFloats, i / kOfBlock); },
      [&](const MergedRows<Shape>& rows) {
        if (n_clusters == 1)
          write_merged<Shape>(call, piece, rows);
        else
          store_merged<Shape>(rows, piece.n_rows, states + split / cluster.n_blocks * Shape::kStateFloats);
      });
  arrive_in_cluster(cluster);
  if (n_clusters > 1) {
    __threadfence();
    Shape::sync();
    bool is_last = false;  // told by the barrier itself: nothing of it goes through shared memory
    if (threadIdx.x == 0) {
      int32_t* const count = call.counters + piece.item * cluster.n_blocks + cluster.rank;
      is_last = atomicAdd(count, 1) == n_clusters - 1;
      if (is_last) *count = 0;
    }
    if (Shape::sync_any(is_last)) {
      __threadfence();
      merge_slice<Shape, true>(
          n_clusters, slice, [&](int i) { return states + i * Shape::kStateFloats; },
          [&](const MergedRows<Shape>& rows) { write_merged<Shape>(call, piece, rows); });
    }
  }
  wait_for_cluster(cluster);  // others may still read this block's states
}

}  // namespace tandem::cuda
