// SPDX-License-Identifier: MIT
// Attention of a few queries over many keys in pages. Bound by reading K and V once, at the speed of memory.
//
// A block has pieces (decode_work.cuh): some of the keys of one (sequence, KV head, tile of query rows). Where an item has
// several pieces, each leaves a state in the workspace, and the last block merges them in the order of the keys. So the
// result has the same bits, whichever block is last.
//
// Each warp has 16 of a unit's keys and a pipeline of its own. Asynchronous copies bring rows to shared memory, kStages
// slices deep, and nothing in the loop waits for another warp. Queries are the narrow side of the products, so that 8 rows
// (the query heads of a KV head) waste little of a tensor core:
//
//   S [16 keys x 8 rows] = K [16 keys x dims] q [dims x 8 rows]         softmax over keys: down the columns
//   O [dims x 8 rows]   += V [dims x 16 keys] P [16 keys x 8 rows]      P: S, turned by movmatrix
//
// Weights are split into two or three summands of the product's 16-bit type. They keep 16 bits or more, and the result is
// as good as f32 sums.
#pragma once

#include "cuda/kernels/decode_lists.cuh"
#include "cuda/kernels/decode_work.cuh"
#include "cuda/kernels/far_weights.cuh"
#include "cuda/kernels/query_rows.cuh"
#include "cuda/kernels/shared_sizes.cuh"
#include "cuda/kernels/stored.cuh"

namespace tandem::cuda {

// The compile-time sizes of a kernel. kTiles: query rows / 8. kOfMultiprocessor: shared memory, as in shared_sizes.cuh.
template <class K_, class V_, int kKDim_, int kVDim_, int kTiles_, int kOfMultiprocessor_>
struct DecodeShape {
  static constexpr int kOfMultiprocessor = kOfMultiprocessor_;
  using K = K_;
  using V = V_;
  static constexpr bool kHasLists = false;
  static constexpr int kKDim = kKDim_, kVDim = kVDim_, kTiles = kTiles_, kRows = 8 * kTiles_;
  using KRow = RowShape<K, kKDim>;
  using VRow = RowShape<V, kVDim>;
  static constexpr int kQParts = K::KeyNumber::kNarrow ? 2 : 3;
  static constexpr int kPParts = V::kParts > 2 || V::kGroup > 0 ? 3 : 2;  // two bf16 leave 2^-17 of a weight
  static constexpr int kStageBytes = KRow::kSliceBytes + VRow::kSliceBytes;
  static constexpr int kQBytes = kQParts * kTiles * KRow::kSteps * 256;
  // Where two stages leave room for four blocks on a multiprocessor, more warps hide more latency: of loads, and of the
  // conversions that small types need. Otherwise longer pipelines hide more.
  static constexpr int kOfFour = kOfMultiprocessor / 4 - 2048 - kQBytes, kOfTwo = kOfMultiprocessor / 2 - 2048 - kQBytes;
  static constexpr int kMost = kOfMultiprocessor - 4096 - kQBytes;
  static constexpr int kWarps = 8 * kStageBytes <= kMost ? 4 : 4 * kStageBytes <= kMost ? 2 : 1;
  static constexpr bool kIsFour = kTiles == 1 && kVDim <= 128 && 8 * kStageBytes <= kOfFour;
  static constexpr int kFit = (kIsFour ? kOfFour : kOfTwo) / (kWarps * kStageBytes);
  static constexpr int kBlocks = kIsFour ? 4 : kFit >= 2 ? 2 : 1;  // on a multiprocessor; limits registers
  static constexpr int kStages = kFit < 2 ? 2 : kFit > 6 ? 6 : kFit;
  static constexpr int kRowsOfWarp = kRows / kWarps, kOfLane = (16 * KRow::kSteps + 31) / 32;
  static_assert(4 * kRowsOfWarp * 16 * KRow::kSteps <= kStageBytes, "q is staged in the stage that is filled last");
  static constexpr int kThreads = 32 * kWarps, kUnitKeys = 16 * kWarps;
  static constexpr int kLeastUnits = 2, kPieceUnits = 1 << 30, kRoundUnits = 0;
  static constexpr int kStateStride = kVDim;
  static constexpr int kStateFloats = kRows * (kVDim + 2);  // floats of a piece's state: o, then m and l of each row
  // Warps leave their states in the place of the pipeline.
  static constexpr int kPipelineBytes =
      kWarps * (kStages * kStageBytes > 4 * kStateFloats ? kStages * kStageBytes : 4 * kStateFloats);
  static constexpr int kSharedBytes = kQBytes + kPipelineBytes;
};

// ---- queries -----------------------------------------------------------------------------------------------------------

// Loads the numbers of one warp's rows. A lane has kOfLane of them, 32 apart.
template <class Shape, class T>
__device__ inline void load_rows(const DecodeCall& call, const Piece& piece, int first,
                                 float (&x)[Shape::kRowsOfWarp][Shape::kOfLane]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Shape::kRowsOfWarp; ++i) {
    const bool is_row = first + i < piece.n_rows;
    const T* from = static_cast<const T*>(call.q.data) +
                    (is_row ? row_offset(call, piece, first + i, call.q.token_stride, call.q.head_stride) : 0);
#pragma unroll
    for (int d = 0; d < Shape::kOfLane; ++d)
      x[i][d] = is_row && lane + 32 * d < Shape::kKDim ? static_cast<float>(from[lane + 32 * d]) : 0.0f;
  }
}

// Returns the exponent of two that scales a row into the upper range of f16.
template <int kOfLane>
__device__ inline int range_of(const float (&x)[kOfLane]) {
  float largest = 0.0f;
#pragma unroll
  for (int d = 0; d < kOfLane; ++d) largest = fmaxf(largest, fabsf(x[d]));
  for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
  return to_range(largest);
}

// Writes q to shared memory in the order of B fragments, as kQParts summands. scale[r] takes products to logits in units of
// ln 2 (without a soft cap) and undoes the scaling of the row. rows: the warp's room for its rows.
template <class Shape>
__device__ void stage_queries(const DecodeCall& call, const Piece& piece, float* rows, uint2* fragments, float* scale) {
  using Number = typename Shape::K::KeyNumber;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * Shape::kRowsOfWarp;
  constexpr int kSteps = Shape::KRow::kSteps, kStride = 16 * kSteps;
  float x[Shape::kRowsOfWarp][Shape::kOfLane];
  if (call.q.dtype == TANDEM_BF16)
    load_rows<Shape, __nv_bfloat16>(call, piece, first, x);
  else if (call.q.dtype == TANDEM_F16)
    load_rows<Shape, __half>(call, piece, first, x);
  else
    load_rows<Shape, float>(call, piece, first, x);
#pragma unroll
  for (int i = 0; i < Shape::kRowsOfWarp; ++i) {
    const int exponent = Number::kNarrow ? range_of(x[i]) : 0;
    const float move = power_of_two(exponent);
    if (lane == 0) scale[first + i] = power_of_two(-exponent) * call.sm_scale * (call.soft_cap > 0.0f ? 1.0f : kLog2E);
#pragma unroll
    for (int d = 0; d < Shape::kOfLane; ++d)
      if (lane + 32 * d < kStride) rows[i * kStride + lane + 32 * d] = x[i][d] * move;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < Shape::kRowsOfWarp; ++i)
    for (int at = lane; at < 4 * kSteps; at += 32) {
      const int t = at % 4, j = at / 4, r = first + i;
      const float* row = rows + i * kStride;
      uint32_t low[Shape::kQParts], high[Shape::kQParts];
      split<Number>(row[Shape::K::key_dim(j, t, 0)], row[Shape::K::key_dim(j, t, 1)], low);
      split<Number>(row[Shape::K::key_dim(j, t, 2)], row[Shape::K::key_dim(j, t, 3)], high);
#pragma unroll
      for (int p = 0; p < Shape::kQParts; ++p)
        fragments[((p * Shape::kTiles + r / 8) * kSteps + j) * 32 + r % 8 * 4 + t] = make_uint2(low[p], high[p]);
    }
}

// ---- keys --------------------------------------------------------------------------------------------------------------

// A warp's walk through the pages: lane i knows the place of the i-th unit from `base` on. No unit is known at first.
struct PageWalk {
  int base = -32;
  int slot = 0;
  int64_t page = 0;  // bytes from the page called 0
};

// Returns the block's first unit, counted from token 0 of the sequence. With lists: from the item's first unit.
template <class Shape>
__device__ inline int first_unit(const Piece& piece) {
  return (Shape::kHasLists ? 0 : static_cast<int>(piece.key_begin / Shape::kUnitKeys)) + piece.first_unit;
}

// Looks up the walk's next units. unit: of the sequence, from token 0 on. Behind the last key a unit is in the page called
// 0, and nothing is read from there.
template <class Shape>
__device__ inline void look_up(const DecodeCall& call, const DeviceSequence& sequence, int unit, PageWalk& walk) {
  walk.base = unit;
  const int own = unit + static_cast<int>(threadIdx.x % 32), page_units = call.page_len / Shape::kUnitKeys;
  const int page_idx = own / page_units;
  walk.slot = own % page_units * Shape::kUnitKeys;
  walk.page = sequence.begin < sequence.end && int64_t{own} * Shape::kUnitKeys < sequence.end
                  ? call.page_tables[sequence.table_begin + page_idx % sequence.table_len]
                  : 0;
}

// Copies the warp's 16 keys of a unit.
template <class Shape>
__device__ inline void copy_keys(const DecodeCall& call, const Piece& piece, int unit, PageWalk& walk, uint32_t stage) {
  if (unit - walk.base >= 32) look_up<Shape>(call, piece.sequence, unit, walk);
  const int64_t page = __shfl_sync(~0u, walk.page, unit - walk.base);
  const int first = static_cast<int>(threadIdx.x / 32 * 16), slot = __shfl_sync(~0u, walk.slot, unit - walk.base) + first;
  const auto plane = [&](int p, int row_bytes) {
    return call.planes[p] + page + piece.head * call.head_stride[p] + slot * row_bytes;
  };
  const int64_t key = int64_t{unit} * Shape::kUnitKeys + first;
  const int lo = static_cast<int>(max(min(piece.sequence.begin - key, int64_t{16}), int64_t{0}));
  const int hi = static_cast<int>(max(min(piece.sequence.end - key, int64_t{16}), int64_t{0}));
  copy_slice<typename Shape::KRow>(stage, plane(kPlaneK, Shape::KRow::kBytes),
                                   plane(kPlaneKScales, 2 * Shape::KRow::kScales), lo, hi);
  copy_slice<typename Shape::VRow>(stage + Shape::KRow::kSliceBytes, plane(kPlaneV, Shape::VRow::kBytes),
                                   plane(kPlaneVScales, 2 * Shape::VRow::kScales), lo, hi);
}

// 16 keys in shared memory, from token `key` on.
struct Slice {
  bool is_whole;  // every query row sees all 16 keys
  int64_t key;
  int lo, hi;  // keys [lo, hi) of the 16 exist

  // [from, to): the tokens that a row sees.
  __device__ bool is_seen(int at, int64_t from, int64_t to) const { return key + at >= from && key + at < to; }
  __device__ bool is_named(int at) const { return at >= lo && at < hi; }
  __device__ bool has_all() const { return lo <= 0 && hi >= 16; }
};

// Returns the warp's slice of a unit. [all_lo, all_hi): the keys that every row sees.
template <class Shape>
__device__ inline Slice find_slice(const Piece& piece, int64_t all_lo, int64_t all_hi, int unit, const PageWalk&) {
  const int64_t key = int64_t{unit} * Shape::kUnitKeys + threadIdx.x / 32 * 16;
  const bool is_whole = key >= all_lo && key + 16 <= all_hi;
  return {is_whole, key, is_whole ? 0 : static_cast<int>(max(piece.sequence.begin - key, int64_t{0})),
          is_whole ? 16 : static_cast<int>(min(piece.sequence.end - key, int64_t{16}))};
}

template <class Shape>
struct WalkOf {
  using Type = PageWalk;
};
template <class Shape>
requires(Shape::kHasLists) struct WalkOf<Shape> {
  using Type = ListWalk;
};

// ---- softmax -----------------------------------------------------------------------------------------------------------

// A thread's part of its warp's state: rows 2 t and 2 t + 1 of each tile, and of o dims value_dim(b, g) and (b, g + 8).
template <class Shape>
struct WarpState {
  float o[Shape::kTiles][Shape::VRow::kSteps][4];
  float m[Shape::kTiles][2];  // largest logit so far, in units of ln 2
  float l[Shape::kTiles][2];  // sum of weights, of this thread's keys
};

template <class Shape>
__device__ inline void clear(WarpState<Shape>& state) {
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n) {
    for (int i = 0; i < 2; ++i) state.m[n][i] = -INFINITY, state.l[n][i] = 0.0f;
    for (int b = 0; b < Shape::VRow::kSteps; ++b)
      for (int i = 0; i < 4; ++i) state.o[n][b][i] = 0.0f;
  }
}

// s += q.k, before scale, for keys g and g + 8 and rows 2 t, 2 t + 1 of each tile. kParts: summands of q.
template <class Shape, int kParts>
__device__ inline void multiply_keys(uint32_t k, const uint2* fragments, float (&s)[Shape::kTiles][4]) {
  using Stored = typename Shape::K;
  using Row = typename Shape::KRow;
  const int lane = threadIdx.x % 32;
  // The sums of a product are truncated, not rounded. Where q has the bits of an f32, that would show.
  constexpr int kApart = kParts > 1 ? 1 : Row::kSteps;
  constexpr int kGroupSteps = Stored::kGroup > 0 ? Stored::kGroup / 16 : kApart;
#pragma unroll
  for (int first = 0; first < Row::kSteps; first += kGroupSteps) {
    float sum[Shape::kTiles][4] = {};
#pragma unroll
    for (int j = first; j < first + kGroupSteps && j < Row::kSteps; ++j) {
      uint32_t a[Stored::kParts][4];
      Stored::keys(a, k, Row::kStride, j, lane);
#pragma unroll
      for (int p = 0; p < kParts; ++p)
#pragma unroll
        for (int n = 0; n < Shape::kTiles; ++n) {
          const uint2 b = fragments[((p * Shape::kTiles + n) * Row::kSteps + j) * 32 + lane];
#pragma unroll
          for (int part = 0; part < Stored::kParts; ++part)
            if (part + p < 3) Stored::KeyNumber::multiply(sum[n], a[part], {b.x, b.y});
        }
    }
    float scale[2] = {1.0f, 1.0f};
    if (Stored::kGroup > 0)
      for (int i = 0; i < 2; ++i)
        scale[i] = load_scale(k + 16 * Row::kStride + 2 * ((lane / 4 + 8 * i) * Row::kScales + first / kGroupSteps));
#pragma unroll
    for (int n = 0; n < Shape::kTiles; ++n)
      for (int i = 0; i < 4; ++i) s[n][i] += Stored::kGroup > 0 ? scale[i / 2] * sum[n][i] : sum[n][i];
  }
}

// o += V P. p: laid out as s. The scales of keys that are not named are undefined, and count as 0.
template <class Shape, class Slice>
__device__ inline void multiply_values(uint32_t v, const float (&p)[Shape::kTiles][4], const Slice& slice,
                                       WarpState<Shape>& state) {
  using Stored = typename Shape::V;
  using Number = typename Stored::ValueNumber;
  using Row = typename Shape::VRow;
  const int lane = threadIdx.x % 32;
  constexpr int kGroupSteps = Stored::kGroup > 0 ? Stored::kGroup / 16 : Row::kSteps;
#pragma unroll
  for (int first = 0; first < Row::kSteps; first += kGroupSteps) {
    uint32_t b[Shape::kPParts][Shape::kTiles][2];
    float scale[2] = {1.0f, 1.0f};
    if (Stored::kGroup > 0)
      for (int i = 0; i < 2; ++i)
        scale[i] = load_scale(v + 16 * Row::kStride + 2 * ((lane / 4 + 8 * i) * Row::kScales + first / kGroupSteps));
    if (Stored::kGroup > 0 && !slice.has_all())
      for (int i = 0; i < 2; ++i)
        if (!slice.is_named(lane / 4 + 8 * i)) scale[i] = 0.0f;
#pragma unroll
    for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t parts[Shape::kPParts];
        split<Number>(p[n][2 * i] * scale[i], p[n][2 * i + 1] * scale[i], parts);
#pragma unroll
        for (int part = 0; part < Shape::kPParts; ++part) b[part][n][i] = transpose(parts[part]);
      }
#pragma unroll
    for (int block = first; block < first + kGroupSteps && block < Row::kSteps; ++block) {
      uint32_t a[Stored::kParts][4];
      Stored::values(a, v, Row::kStride, block, lane);
#pragma unroll
      for (int n = 0; n < Shape::kTiles; ++n) {
        // The sums of a product are truncated, not rounded. Over many keys that would show in an f32's last bits.
        float apart[4] = {};
        float(&sum)[4] = Stored::kParts > 1 ? apart : state.o[n][block];
#pragma unroll
        for (int part = 0; part < Stored::kParts; ++part)
#pragma unroll
          for (int weight = 0; weight + part < Shape::kPParts; ++weight) Number::multiply(sum, a[part], b[weight][n]);
        if (Stored::kParts > 1)
          for (int i = 0; i < 4; ++i) state.o[n][block][i] += apart[i];
      }
    }
  }
}

// o += V P, for weights that are far (far_weights.cuh). Sets these to 0 in p.
template <class Shape>
__device__ inline void multiply_far(uint32_t v, float (&p)[Shape::kTiles][4], WarpState<Shape>& state) {
  using Stored = typename Shape::V;
  using Row = typename Shape::VRow;
  static_assert(Stored::kGroup == 0, "weights meet no scales");
  bool has_far = false;
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n) has_far |= any_far<Stored>(p[n]);
  if (!__any_sync(~0u, has_far)) return;
  uint32_t b[2][Shape::kTiles][2];
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t parts[2];
      split<Bfloat>(take_far<Stored>(p[n][2 * i]), take_far<Stored>(p[n][2 * i + 1]), parts);
      for (int part = 0; part < 2; ++part) b[part][n][i] = transpose(parts[part]);
    }
#pragma unroll
  for (int block = 0; block < Row::kSteps; ++block) {
    uint32_t a[1][4];
    Stored::values(a, v, Row::kStride, block, threadIdx.x % 32);
    const WideFragment<Stored> wide(a[0]);
#pragma unroll
    for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
      for (int part = 0; part < wide.kParts; ++part)
#pragma unroll
        for (int weight = 0; weight + part < 2; ++weight) Bfloat::multiply(state.o[n][block], wide.of[part], b[weight][n]);
  }
}

// The keys that a thread's rows see, and the scales from logits to powers of 2.
template <class Shape>
struct RowView {
  float scale[Shape::kTiles][2];
  int64_t lo[Shape::kTiles][2], hi[Shape::kTiles][2];
  int64_t all_lo, all_hi;  // the keys that every row sees
};

template <class Shape>
__device__ RowView<Shape> view_rows(const DecodeCall& call, const Piece& piece, const float* scale) {
  RowView<Shape> view;
  const DeviceSequence& sequence = piece.sequence;
  const int64_t begin = Shape::kHasLists ? 0 : sequence.begin;
  const int64_t sliding_window = Shape::kHasLists ? piece.sliding_window : call.sliding_window;
  view.all_lo = begin;
  const int64_t queries_end = sequence.end + sequence.n_after;
  view.all_hi = min(sequence.end, queries_end - sequence.q_len + 1);
  if (sliding_window > 0) view.all_lo = max(view.all_lo, queries_end - sliding_window);
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n)
    for (int i = 0; i < 2; ++i) {
      const int r = 8 * n + threadIdx.x % 4 * 2 + i, token = (piece.first_row + r) / call.group_size;
      view.scale[n][i] = scale[r];
      const int64_t hi = queries_end - sequence.q_len + 1 + token;
      view.lo[n][i] = sliding_window > 0 ? max(begin, hi - sliding_window) : begin;
      view.hi[n][i] = min(hi, sequence.end);
    }
  return view;
}

// Adds one slice of 16 keys to the warp's state.
template <class Shape, class Slice>
__device__ inline void attend_slice(const DecodeCall& call, const RowView<Shape>& view, const Slice& slice, uint32_t stage,
                                    const uint2* fragments, WarpState<Shape>& state) {
  float s[Shape::kTiles][4] = {};
  if (call.n_q_parts == 1)
    multiply_keys<Shape, 1>(stage, fragments, s);
  else
    multiply_keys<Shape, Shape::kQParts>(stage, fragments, s);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n)
    for (int i = 0; i < 4; ++i) s[n][i] *= view.scale[n][i % 2];
  if (call.soft_cap > 0.0f) {
#pragma unroll
    for (int n = 0; n < Shape::kTiles; ++n)
      for (int i = 0; i < 4; ++i) s[n][i] = call.soft_cap * tanhf(s[n][i] / call.soft_cap) * kLog2E;
  }
  if (!slice.is_whole) {
#pragma unroll
    for (int n = 0; n < Shape::kTiles; ++n)
      for (int i = 0; i < 4; ++i)
        if (!slice.is_seen(lane / 4 + i / 2 * 8, view.lo[n][i % 2], view.hi[n][i % 2])) s[n][i] = -INFINITY;
  }
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n) {
    float faded[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = fmaxf(s[n][i], s[n][i + 2]);
      for (int mask = 4; mask < 32; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
      const float before = state.m[n][i], now = fmaxf(before, largest);
      const float from = now == -INFINITY ? 0.0f : now - Shape::V::ValueNumber::kShift;  // no key is seen yet
      for (int k = i; k < 4; k += 2) s[n][k] = exp2_fast(s[n][k] - from);
      faded[i] = now == before ? 1.0f : exp2_fast(before - now);
      state.m[n][i] = now;
      state.l[n][i] = state.l[n][i] * faded[i] + (s[n][i] + s[n][i + 2]);
    }
    if (__any_sync(~0u, faded[0] != 1.0f || faded[1] != 1.0f)) {
#pragma unroll
      for (int b = 0; b < Shape::VRow::kSteps; ++b)
        for (int i = 0; i < 4; ++i) state.o[n][b][i] *= faded[i % 2];
    }
  }
  if constexpr (kHasFar<typename Shape::V>) multiply_far<Shape>(stage + Shape::KRow::kSliceBytes, s, state);
  multiply_values<Shape>(stage + Shape::KRow::kSliceBytes, s, slice, state);
}

// ---- states ------------------------------------------------------------------------------------------------------------

// Stores a warp's state: o [kRows][kVDim], then m and l [kRows].
template <class Shape>
__device__ void store_state(const WarpState<Shape>& state, float* to) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 8 * n + 2 * t + i;
      float l = state.l[n][i];
      for (int mask = 4; mask < 32; mask *= 2) l += __shfl_xor_sync(~0u, l, mask);
      if (g == 0) {
        to[Shape::kRows * Shape::kVDim + 2 * r] = state.m[n][i];
        to[Shape::kRows * Shape::kVDim + 2 * r + 1] = l;
      }
#pragma unroll
      for (int b = 0; b < Shape::VRow::kSteps; ++b)
        for (int half = 0; half < 2; ++half) {
          const int dim = Shape::V::value_dim(b, g + 8 * half);
          if (dim < Shape::kVDim) to[r * Shape::kVDim + dim] = state.o[n][b][i + 2 * half];
        }
    }
}

// For a piece that is one of several of its item: leaves its state, and merges all states if it is the last.
template <class Shape>
__device__ void finish_among(const DecodeCall& call, const Piece& piece, const float* warp_states, int* is_last) {
  // A piece that does not begin its item is its block's first piece. A piece that begins an item of several pieces is its
  // block's last.
  const int first = piece.first_block, last = piece.end_block - 1;
  const auto state_of = [&](int block) {
    return call.states + (2 * block + (block == first ? 1 : 0)) * Shape::kStateFloats;
  };
  float* own = state_of(blockIdx.x);
  merge_states<Shape, false>(
      Shape::kWarps, piece.n_rows, [&](int i) { return warp_states + i * Shape::kStateFloats; },
      [&](int r, int dim, const auto& o, float m, float l) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < (Shape::kVDim + 31) / 32; ++k)
          if (lane + 32 * k < dim) own[r * Shape::kVDim + lane + 32 * k] = o[k];
        if (lane < 2) own[Shape::kRows * Shape::kVDim + 2 * r + lane] = lane == 0 ? m : l;
      });
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *is_last = atomicAdd(call.counters + piece.item, 1) == last - first;
    if (*is_last) call.counters[piece.item] = 0;
  }
  __syncthreads();
  if (!*is_last) return;
  __threadfence();
  merge_states<Shape, true>(
      last - first + 1, piece.n_rows, [&](int i) { return state_of(first + i); },
      RowWriter{&call, &piece, Shape::V::ValueNumber::kShift});
}

// ---- the kernel --------------------------------------------------------------------------------------------------------

// Attends the warp's slices of a piece, one after another.
template <class Shape>
__device__ void attend_piece(const DecodeCall& call, const Piece& piece, std::byte* pipeline, uint2* fragments, float* scale,
                             WarpState<Shape>& state) {
  const int warp = threadIdx.x / 32;
  const uint32_t stages = shared_address(pipeline) + warp * Shape::kStages * Shape::kStageBytes;
  const int n_units = piece.end_unit - piece.first_unit, first = first_unit<Shape>(piece);
  typename WalkOf<Shape>::Type walk;
  int n_copied = 0;
  const auto copy_next = [&] {
    if (n_copied < n_units)
      copy_keys<Shape>(call, piece, first + n_copied, walk, stages + n_copied % Shape::kStages * Shape::kStageBytes);
    ++n_copied;
    commit_copies();
  };
  for (int i = 0; i < Shape::kStages - 1; ++i) copy_next();
  float* const rows = reinterpret_cast<float*>(pipeline + (warp * Shape::kStages + Shape::kStages - 1) * Shape::kStageBytes);
  stage_queries<Shape>(call, piece, rows, fragments, scale);
  __syncthreads();
  const RowView<Shape> view = view_rows<Shape>(call, piece, scale);
  for (int i = 0; i < n_units; ++i) {
    wait_for_copies<Shape::kStages - 2>();
    __syncwarp();
    copy_next();
    attend_slice<Shape>(call, view, find_slice<Shape>(piece, view.all_lo, view.all_hi, first + i, walk),
                        stages + i % Shape::kStages * Shape::kStageBytes, fragments, state);
    __syncwarp();
  }
  wait_for_copies<0>();
}

template <class Shape>
__device__ __forceinline__ void decode_pieces(const DecodeCall& call) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ float scale[Shape::kRows];
  __shared__ int is_last;
  auto* const fragments = reinterpret_cast<uint2*>(shared);
  std::byte* const pipeline = shared + Shape::kQBytes;
  auto* const warp_states = reinterpret_cast<float*>(pipeline);
  const int warp = threadIdx.x / 32;
  const Share share = Share::make<Shape>(call);
  const int block = static_cast<int>(blockIdx.x);
  int at = share.is_by_item ? 0 : share.begin_of(block);
  const int end = share.is_by_item ? 1 : share.begin_of(block + 1);
  WarpState<Shape> state;
  while (at < end) {
    const Piece piece = find_piece<Shape>(call, share, at);
    const int n_units = piece.end_unit - piece.first_unit;
    if (n_units == 0) return;  // more blocks than there is work for
    clear(state);
    attend_piece<Shape>(call, piece, pipeline, fragments, scale, state);
    __syncthreads();
    store_state<Shape>(state, warp_states + warp * Shape::kStateFloats);
    __syncthreads();
    if (piece.end_block - piece.first_block == 1)
      merge_states<Shape, false>(
          Shape::kWarps, piece.n_rows, [&](int i) { return warp_states + i * Shape::kStateFloats; },
          RowWriter{&call, &piece, Shape::V::ValueNumber::kShift});
    else
      finish_among<Shape>(call, piece, warp_states, &is_last);
    __syncthreads();
    at = share.is_by_item ? end : at + n_units;
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) decode_kernel(const __grid_constant__ DecodeCall call) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsForThisCode<Shape::kOfMultiprocessor>) decode_pieces<Shape>(call);
#endif
}

}  // namespace tandem::cuda
