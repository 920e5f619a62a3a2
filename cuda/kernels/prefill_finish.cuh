// SPDX-License-Identifier: MIT
// How the blocks of a prefill kernel finish: they write their rows, or first merge the states of an item's blocks.
//
// Kernels for compute capability 9.0 merge in clusters. The blocks of a cluster share an item. They run at once and read
// each other's shared memory. Block i of n merges rows i, i + n, i + 2 n, ... of all states. An item may have several
// clusters. Then block i of each cluster writes its merged rows to the workspace and counts itself there, and the last of
// these blocks merges the rows of all clusters. The rows are divided so that no single block merges everything: over short
// contexts that would take longer than the attention itself.
#pragma once

#include "cuda/kernels/prefill_work.cuh"

namespace tandem::cuda {

// The end of a row that has a state from before. before: the factor of that state.
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

// The places of row r of a piece: in the output, and in the state from before.
struct RowPlace {
  int64_t out = 0, before = 0;
};
__device__ inline RowPlace place_row(const PrefillCall& call, const Piece& piece, const DeviceOutput& out, int r, int dim) {
  return {row_offset(call, piece, r, out.o.token_stride, out.o.head_stride), state_row(call, piece, r) * dim};
}
__device__ inline void write_lse(const PrefillCall& call, const Piece& piece, const DeviceOutput& out, int r, float lse) {
  if (out.lse != nullptr) out.lse[row_offset(call, piece, r, out.lse_token_stride, out.lse_head_stride)] = lse;
}

// A row of a state. A warp has two rows of up to 128 dims, 16 lanes each, or one longer row. A lane has four neighbouring
// dims, and the same 4 kLanes dims further on.
template <class Shape>
struct LaneRow {
  static constexpr int kLanes = Shape::kVDim <= 128 ? 16 : 32, kOfWarp = 32 / kLanes;
  static constexpr int kOfLane = (Shape::kVDim + 4 * kLanes - 1) / (4 * kLanes);
  float4 o[kOfLane];

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  // index of the lane's row in the warp
  __device__ static int of_warp() { return static_cast<int>(threadIdx.x) % 32 / kLanes; }
  __device__ static int dim(int k) { return 4 * (lane() + kLanes * k); }
  __device__ static bool has(int k) { return dim(k) < Shape::kVDim; }
  __device__ void clear() {
    for (float4& x : o) x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __device__ void load(const float* row, bool is_there) {
    clear();
#pragma unroll
    for (int k = 0; k < kOfLane; ++k)
      if (is_there && has(k)) o[k] = *reinterpret_cast<const float4*>(row + dim(k));
  }
  __device__ void store(float* row) const {
#pragma unroll
    for (int k = 0; k < kOfLane; ++k)
      if (has(k)) *reinterpret_cast<float4*>(row + dim(k)) = o[k];
  }
  // Writes the row to the output.
  __device__ void write(const PrefillCall& call, const DeviceRows& to, const JoinedEnd& end, const RowPlace& place) const {
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      if (!has(k)) continue;
      float x[4] = {o[k].x, o[k].y, o[k].z, o[k].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = end.own.factor == 0.0f ? 0.0f : x[i] * end.own.factor;
      if (end.before != 0.0f)
        for (int i = 0; i < 4; ++i) x[i] = fmaf(end.before, call.before_o[place.before + dim(k) + i], x[i]);
      store_numbers(to.data, to.dtype, place.out + dim(k), x);
    }
  }
};

// Writes a state in shared memory to the output. A warp has neighbouring rows. Each lane computes the end of one row.
template <class Shape>
__device__ void write_rows(const PrefillCall& call, const Piece& piece, const float* state) {
  using Row = LaneRow<Shape>;
  constexpr int kRowsOfWarp = Shape::kRows / Shape::kWarps;
  static_assert(kRowsOfWarp <= 32 && kRowsOfWarp % Row::kOfWarp == 0);
  const int lane = threadIdx.x % 32, first = static_cast<int>(threadIdx.x / 32) * kRowsOfWarp, own = first + lane;
  const DeviceOutput out = output_of(call, piece);
  JoinedEnd own_end;
  RowPlace own_place;
  if (lane < kRowsOfWarp && own < piece.n_rows) {
    const float* rest = state + Shape::kRows * Shape::kStateStride + 2 * own;
    own_end = join_row(call, piece, own, rest[0], rest[1], Shape::Number::kShift);
    own_place = place_row(call, piece, out, own, Shape::kVDim);
    write_lse(call, piece, out, own, own_end.own.lse);
  }
  const int n_rows = min(kRowsOfWarp, piece.n_rows - first);
#pragma unroll 2
  for (int base = 0; base < n_rows; base += Row::kOfWarp) {
    const int i = base + Row::of_warp();
    const JoinedEnd end = {{__shfl_sync(~0u, own_end.own.factor, i), 0.0f}, __shfl_sync(~0u, own_end.before, i)};
    const RowPlace place = {__shfl_sync(~0u, own_place.out, i), __shfl_sync(~0u, own_place.before, i)};
    if (i >= n_rows) continue;
    Row row;
    row.load(state + (first + i) * Shape::kStateStride, true);
    row.write(call, out.o, end, place);
  }
}

// A row that is merged from several states.
template <class Shape>
struct MergedRow {
  using Row = LaneRow<Shape>;
  Row row;
  float m = -INFINITY, l = 0.0f;

  // Adds up to kStates states. rest: m and l of state i in lane i of the row's lanes, and of an empty state in the others.
  template <int kStates>
  __device__ void include(const float2& rest, const Row (&x)[kStates]) {
    float most = rest.x;
    for (int mask = 1; mask < kStates; mask *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
    most = fmaxf(m, __shfl_sync(~0u, most, 0, Row::kLanes));
    const float own = rest.x == -INFINITY ? 0.0f : exp2_fast(rest.x - most);
    const float faded = m == -INFINITY ? 0.0f : exp2_fast(m - most);
    float sum = own * rest.y;  // NaN where l is NaN, even with weight 0
    for (int mask = 1; mask < kStates; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    m = most;
    l = l * faded + __shfl_sync(~0u, sum, 0, Row::kLanes);
#pragma unroll
    for (int k = 0; k < Row::kOfLane; ++k) fade(row.o[k], faded);
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      const float weight = __shfl_sync(~0u, own, i, Row::kLanes);
#pragma unroll
      for (int k = 0; k < Row::kOfLane; ++k)
        if (weight != 0.0f) add(row.o[k], weight, x[i].o[k]);
    }
  }
  // Writes row r to the output. store() writes it to a state in the workspace.
  __device__ void write(const PrefillCall& call, const Piece& piece, const DeviceOutput& out, int r) const {
    const JoinedEnd end = join_row(call, piece, r, m, l, Shape::Number::kShift);
    __syncwarp(Row::kLanes == 32 ? ~0u : 0xffffu << 16 * Row::of_warp());  // all lanes have read what lane 0 writes next
    row.write(call, out.o, end, place_row(call, piece, out, r, Shape::kVDim));
    if (Row::lane() == 0) write_lse(call, piece, out, r, end.own.lse);
  }
  __device__ void store(float* state, int r) const {
    row.store(state + r * Shape::kStateStride);
    if (Row::lane() == 0) reinterpret_cast<float2*>(state + Shape::kRows * Shape::kStateStride)[r] = make_float2(m, l);
  }
};

// Every step-th of n_rows rows, from `first` on.
struct RowSlice {
  int n_rows, first, step;
};

// Merges n_states states, the i-th at state(i), and calls out(r, row) for each row of the slice. The code is short, as a
// kernel runs it once and fetches it from memory.
template <class Shape, class StateAt, class Out>
__device__ void merge_slice(int n_states, const RowSlice& slice, StateAt state, Out out) {
  using Row = LaneRow<Shape>;
  constexpr int kAtOnce = Shape::kStatesAtOnce;
  const int lane = Row::lane(), step = slice.step * Row::kOfWarp;
#pragma unroll 1
  for (int base = slice.first + step * static_cast<int>(threadIdx.x / 32); base < slice.n_rows;
       base += step * Shape::kWarps) {
    const int r = base + slice.step * Row::of_warp();
    const bool is_there = r < slice.n_rows;
    MergedRow<Shape> merged;
    merged.row.clear();
#pragma unroll 1
    for (int first = 0; first < n_states; first += kAtOnce) {
      const int n = min(kAtOnce, n_states - first);
      Row x[kAtOnce];
      const float* const of_lane = state(first + min(lane, n - 1)) + Shape::kRows * Shape::kStateStride;
      float2 rest = make_float2(-INFINITY, 0.0f);
      if (is_there && lane < n) rest = reinterpret_cast<const float2*>(of_lane)[r];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) x[i].load(state(first + min(i, n - 1)) + r * Shape::kStateStride, is_there && i < n);
      merged.include(rest, x);
    }
    __syncwarp();
    if (is_there) out(r, merged);
  }
}

// Returns true if this block is the last of n that count. It then sees what the others have left in memory. All threads
// that multiply call it, after their writes.
template <class Shape>
__device__ inline bool is_last_of(int32_t* count, int n) {
  __threadfence();
  Shape::sync();
  bool is_last = false;  // the barrier itself carries the value, and shared memory stays unused
  if (threadIdx.x == 0) {
    is_last = atomicAdd(count, 1) == n - 1;
    if (is_last) *count = 0;
  }
  if (!Shape::sync_any(is_last)) return false;
  __threadfence();
  return true;
}

// Turns the block's state into output. `own` is in shared memory if the block has all keys of its item, else in the
// workspace.
template <class Shape>
__device__ void finish_item(const PrefillCall& call, const PrefillItem& item, const float* own) {
  if (item.n_parts == 1) {
    Shape::sync();
    return write_rows<Shape>(call, item.piece, own);
  }
  if (!is_last_of<Shape>(call.counters + item.piece.item, item.n_parts)) return;
  const float* states = call.states + int64_t{item.slot} * Shape::kStateFloats;
  const DeviceOutput out = output_of(call, item.piece);
  merge_slice<Shape>(
      item.n_parts, {item.piece.n_rows, 0, 1}, [&](int i) { return states + i * Shape::kStateFloats; },
      [&](int r, const MergedRow<Shape>& row) { row.write(call, item.piece, out, r); });
}

// Called by all threads that multiply, after they have stored the block's states (kKeySplits of them) to shared memory. A
// cluster merges its own states. Where an item has several clusters, the last one then merges theirs.
template <class Shape>
__device__ void finish_in_cluster(const PrefillCall& call, const PrefillItem& item, const float* own) {
  constexpr int kOfBlock = Shape::kKeySplits;
  const Cluster cluster = this_cluster();
  const int n_clusters = item.n_parts / cluster.n_blocks;
  const Piece& piece = item.piece;
  const RowSlice slice = {piece.n_rows, cluster.rank, cluster.n_blocks};
  const DeviceOutput out = output_of(call, piece);
  float* const states = call.states + int64_t{item.slot} * Shape::kStateFloats;
  Shape::sync();
  arrive_in_cluster(cluster);
  wait_for_cluster(cluster);
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    merge_slice<Shape>(
        round == 0 ? cluster.n_blocks * kOfBlock : n_clusters, slice,
        [&](int i) -> const float* {
          if (round == 1) return states + i * Shape::kStateFloats;
          return shared_of_block(cluster, own + i % kOfBlock * Shape::kStateFloats, i / kOfBlock);
        },
        [&](int r, const MergedRow<Shape>& row) {
          if (round == 1 || n_clusters == 1)
            row.write(call, piece, out, r);
          else
            row.store(states + item.part / cluster.n_blocks * Shape::kStateFloats, r);
        });
    if (round == 1) break;
    arrive_in_cluster(cluster);
    if (n_clusters == 1 || !is_last_of<Shape>(call.counters + item.slot * cluster.n_blocks + cluster.rank, n_clusters))
      break;
  }
  wait_for_cluster(cluster);  // others may still read this block's states
}

}  // namespace tandem::cuda
