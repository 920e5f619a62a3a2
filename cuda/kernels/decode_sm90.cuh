// SPDX-License-Identifier: MIT
// Decode for compute capability 9.0. As decode.cuh, but the copy engine brings the keys, and the product of queries and
// keys is transposed.
//
// A block has a multiprocessor to itself. Each warp has every kWarps-th unit of kKeys keys of the block's piece
// (decode_work.cuh). A warp's units travel through kStages stages of its own, as boxes whose copies one lane starts.
// Nothing in the loop waits for another warp. Keys are the columns of the logits, so the softmax leaves weights in the
// layout of the next product:
//
//   S [16 x 8 keys]    = q [16 x dims] K [dims x 8 keys]        softmax over keys: along a row, which 4 lanes share
//   O [dims x 8 rows] += V [dims x 16 keys] P [16 keys x 8 rows]
//
// 8 of the 16 rows of q are a tile of query rows. The other 8 are a second tile or, with one tile, the second summand of
// the first.
//
// A call is short compared with the work around its reads. So a block finds its piece, starts the copies of its keys, and
// stages q meanwhile. At the end the states of its warps become one, and the last block of an item loads all states of a
// row at once. The next kernel may start before this one ends.
#pragma once

#include "cuda/kernels/beside_append.cuh"
#include "cuda/kernels/decode_sm90_few.cuh"
#include "cuda/kernels/decode_sm90_lists.cuh"

namespace tandem::cuda {

// ---- products ----------------------------------------------------------------------------------------------------------

// s = q.k before scale, of row g of each tile.
template <class Shape>
__device__ inline void multiply_keys(const DecodeCall& call, uint32_t k, uint32_t scales, const StagedQueries& staged,
                                     Logits<Shape>& s) {
  using K = typename Shape::K;
  constexpr int kBlocks = Shape::kKeys / 8, kSumSteps = 2;  // steps that are summed at once; sums are truncated, not rounded
  const int lane = threadIdx.x % 32;
  const uint32_t row = K::template key_row<typename Shape::KRows>(k, lane);
  KeyScales<Shape::kKScales> scale[kBlocks][2];
  load_key_scales<Shape>(scales, scale);
#pragma unroll
  for (int first = 0; first < Shape::kKSteps; first += kSumSteps) {
    float sum[kBlocks][4] = {};
#pragma unroll
    for (int j = first; j < first + kSumSteps && j < Shape::kKSteps; j += K::kKeySteps) {
      uint32_t b[K::kKeySteps][kBlocks][2];
      K::template keys<typename Shape::KRows>(b, row, j);
#pragma unroll
      for (int quad = 0; quad < Shape::kQuads; ++quad) {
        if (quad > 0 && call.n_q_parts <= (Shape::kTiles == 1 ? 2 : 1) * quad) break;
#pragma unroll
        for (int i = 0; i < K::kKeySteps; ++i) {
          const uint4 q = staged.fragments[(quad * Shape::kKSteps + j + i) * 32 + lane];
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) K::KeyNumber::multiply(sum[n], {q.x, q.y, q.z, q.w}, b[i][n]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float each = K::kGroup > 0 ? scale[n][i].at(first / 2) : 1.0f;
#pragma unroll
        for (int tile = 0; tile < Shape::kTiles; ++tile) {
          const float x = Shape::kTiles == 1 ? sum[n][i] + sum[n][i + 2] : sum[n][i + 2 * tile];
          s[tile][n][i] = first == 0 ? each * x : K::kGroup > 0 ? s[tile][n][i] + each * x : s[tile][n][i] + x;
        }
      }
  }
}

// Weights as the summands of a product.
template <class Shape>
struct WeightParts {
  using Number = typename Shape::V::ValueNumber;
  uint32_t of[Shape::kPParts][Shape::kTiles][Shape::kKeys / 8];

  __device__ void split_all(const Logits<Shape>& p) {
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n)
#pragma unroll
      for (int tile = 0; tile < Shape::kTiles; ++tile) {
        uint32_t parts[Shape::kPParts];
        split<Number>(p[tile][n][0], p[tile][n][1], parts);
#pragma unroll
        for (int part = 0; part < Shape::kPParts; ++part) of[part][tile][n] = parts[part];
      }
  }
  // Sets p times a group's scales.
  __device__ void scale_all(const WeightParts& p, uint32_t scales) {
    const float4 pairs = load_floats(scales);
    const float scale[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n)
#pragma unroll
      for (int tile = 0; tile < Shape::kTiles; ++tile) {
        uint32_t parts[2];
        scale_parts(p.of[0][tile][n], p.of[1][tile][n], __float_as_uint(scale[n]), parts);
        of[0][tile][n] = parts[0], of[1][tile][n] = parts[1];
      }
  }
  __device__ void multiply(int tile, int k, const uint32_t (&a)[4], float (&sum)[4]) const {
#pragma unroll
    for (int part = 0; part < Shape::kPParts; ++part)
      Number::multiply(sum, a, {of[part][tile][2 * k], of[part][tile][2 * k + 1]});
  }
};

// o += V P. scales: in o's units (ValueScales).
template <class Shape>
__device__ inline void multiply_values(uint32_t v, uint32_t scales, const WeightParts<Shape>& p, RowState<Shape>& state) {
  using V = typename Shape::V;
  const int lane = threadIdx.x % 32;
  const uint32_t row = V::template value_row<typename Shape::VRows, typename Shape::K>(v, lane);
  WeightParts<Shape> scaled;
  for_values<Shape>(row, [&](int block, int i, const auto& a) {
    if constexpr (Shape::kVScales > 0)
      if (block % 2 == 0) scaled.scale_all(p, scales + block / 2 * 64 + lane % 4 * 16);
    const WeightParts<Shape>& weights = Shape::kVScales > 0 ? scaled : p;
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile)
#pragma unroll
      for (int k = 0; k < Shape::kKeys / 16; ++k) weights.multiply(tile, k, a[k][i], state.o[tile][block]);
  });
}

// ---- softmax -----------------------------------------------------------------------------------------------------------

// The keys that a lane's rows see, and the scales from products to powers of 2.
template <class Shape>
struct SeenKeys {
  float scale[Shape::kTiles];
  int64_t lo[Shape::kTiles], hi[Shape::kTiles];
  int64_t all_lo, all_hi;  // the keys that every row sees
};

template <class Shape>
__device__ SeenKeys<Shape> see_keys(const DecodeCall& call, const Piece& piece, const float* scale) {
  SeenKeys<Shape> seen;
  const DeviceSequence& sequence = piece.sequence;
  const int64_t begin = Shape::kHasLists ? 0 : sequence.begin, sliding_window = sliding_window_of<Shape>(call, piece);
  seen.all_lo = begin;
  const int64_t queries_end = sequence.end + sequence.n_after, first_hi = queries_end - sequence.q_len + 1;
  seen.all_hi = min(sequence.end, first_hi);
  if (sliding_window > 0) seen.all_lo = max(seen.all_lo, queries_end - sliding_window);
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n) {
    const int r = Shape::kIsFew ? threadIdx.x % 4 : 8 * n + threadIdx.x % 32 / 4;
    seen.scale[n] = scale[r];
    const int64_t hi = first_hi + (piece.first_row + r) / call.group_size;
    seen.lo[n] = sliding_window > 0 ? max(begin, hi - sliding_window) : begin;
    seen.hi[n] = min(hi, sequence.end);
  }
  return seen;
}

// Turns products into logits in units of ln 2. The logit is -inf where a row does not see the key.
template <class Shape, class Unit>
__device__ inline void make_logits(const DecodeCall& call, const SeenKeys<Shape>& seen, const Unit& unit, Logits<Shape>& s) {
#pragma unroll
  for (int tile = 0; tile < Shape::kTiles; ++tile)
    for (int n = 0; n < Shape::kKeys / 8; ++n)
      for (int i = 0; i < 2; ++i) s[tile][n][i] *= seen.scale[tile];
  if (call.soft_cap > 0.0f) {
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile)
      for (int n = 0; n < Shape::kKeys / 8; ++n)
        for (int i = 0; i < 2; ++i) s[tile][n][i] = call.soft_cap * tanhf(s[tile][n][i] / call.soft_cap) * kLog2E;
  }
  if (unit.is_whole) return;
#pragma unroll
  for (int tile = 0; tile < Shape::kTiles; ++tile)
    for (int n = 0; n < Shape::kKeys / 8; ++n) {
      const auto eight = unit.eight(n);
      for (int i = 0; i < 2; ++i) {
        const int key = Shape::K::key_of(static_cast<int>(threadIdx.x % 4) * 2 + i);
        if (!eight.is_seen(key, seen.lo[tile], seen.hi[tile])) s[tile][n][i] = -INFINITY;
      }
    }
}

template <class Shape, class Unit>
__device__ inline void make_few_logits(const DecodeCall& call, const SeenKeys<Shape>& seen, const Unit& unit,
                                       FewLogits<Shape>& s) {
#pragma unroll
  for (int n = 0; n < Shape::kKeys / 8; ++n) s[n] *= seen.scale[0];
  if (call.soft_cap > 0.0f) {
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n) s[n] = call.soft_cap * tanhf(s[n] / call.soft_cap) * kLog2E;
  }
  if (unit.is_whole) return;
#pragma unroll
  for (int n = 0; n < Shape::kKeys / 8; ++n) {
    const int key = Shape::K::key_of(static_cast<int>(threadIdx.x % 32 / 4));
    if (!unit.eight(n).is_seen(key, seen.lo[0], seen.hi[0])) s[n] = -INFINITY;
  }
}

// Turns logits into weights times 2^kShift. The state so far fades where a larger logit has come.
template <class Shape>
__device__ inline void weigh(Logits<Shape>& s, RowState<Shape>& state) {
#pragma unroll
  for (int tile = 0; tile < Shape::kTiles; ++tile) {
    float largest = -INFINITY;
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n) largest = fmaxf(largest, fmaxf(s[tile][n][0], s[tile][n][1]));
    for (int mask = 1; mask < 4; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    const float before = state.m[tile], now = fmaxf(before, largest);
    const float from = now == -INFINITY ? 0.0f : now - static_cast<float>(Shape::V::kShift);  // no key is seen yet
    const float faded = now == before ? 1.0f : exp2_fast(before - now);
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n)
      for (int i = 0; i < 2; ++i) sum += s[tile][n][i] = exp2_fast(s[tile][n][i] - from);
    state.m[tile] = now;
    state.l[tile] = state.l[tile] * faded + sum;
    if (!__any_sync(~0u, faded != 1.0f)) continue;
    float most_faded = 1.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float of_column = __shfl_sync(~0u, faded, (threadIdx.x % 4 * 2 + i) * 4);
      most_faded = fminf(most_faded, of_column);
#pragma unroll
      for (int b = 0; b < Shape::kVSteps; ++b) state.o[tile][b][i] *= of_column, state.o[tile][b][i + 2] *= of_column;
    }
    fade_least<Shape>(most_faded, state);
  }
}

template <class Shape, class Unit>
__device__ inline void attend_few(const DecodeCall& call, const SeenKeys<Shape>& seen, const Unit& unit,
                                  const StagedQueries& staged, RowState<Shape>& state) {
  FewLogits<Shape> s;
  multiply_few_keys<Shape>(unit.stage.boxes, unit.stage.scales, staged, s);
  make_few_logits<Shape>(call, seen, unit, s);
  weigh_few<Shape>(s, state);
  multiply_few_values<Shape>(unit.stage.boxes + Shape::KRows::kBytes, unit.stage.scales + 2 * Shape::kKeys * Shape::kKScales,
                             s, state);
}

template <class Shape, class Unit>
__device__ inline void attend_rows(const DecodeCall& call, const SeenKeys<Shape>& seen, const Unit& unit,
                                   const StagedQueries& staged, RowState<Shape>& state) {
  const uint32_t values = unit.stage.boxes + Shape::KRows::kBytes;
  ValueScales<Shape> scales = {unit.stage.scales + 2 * Shape::kKeys * Shape::kKScales, unit.stage.scaled};
  if constexpr (Shape::kVScales > 0) scales.begin(state);
  Logits<Shape> s;
  multiply_keys<Shape>(call, unit.stage.boxes, unit.stage.scales, staged, s);
  make_logits<Shape>(call, seen, unit, s);
  weigh<Shape>(s, state);
  if constexpr (kHasFar<typename Shape::V>)
    attend_far<Shape>(values, unit.stage.scales + 2 * Shape::kKeys * Shape::kKScales, s, state);
  WeightParts<Shape> p;
  p.split_all(s);
  if constexpr (Shape::kVScales == 0) {
    multiply_values<Shape>(values, 0, p, state);
  } else {
    __syncwarp();
    for (;;) {
      multiply_values<Shape>(values, unit.stage.scaled, p, state);
      if (__builtin_expect(static_cast<long>(!scales.has_rest), 1)) break;
      scales.go_on(state);
    }
    scales.finish(state);
  }
}

// Adds a unit to the warp's state.
template <class Shape, class Unit>
__device__ inline void attend_unit(const DecodeCall& call, const SeenKeys<Shape>& seen, const Unit& unit,
                                   const StagedQueries& staged, RowState<Shape>& state) {
  if (!unit.is_whole)
    clear_values<Shape>(unit.stage.boxes + Shape::KRows::kBytes, unit.stage.scales + 2 * Shape::kKeys * Shape::kKScales,
                        unit.named());
  if constexpr (Shape::kIsFew)
    attend_few<Shape>(call, seen, unit, staged, state);
  else
    attend_rows<Shape>(call, seen, unit, staged, state);
}

// ---- the kernel --------------------------------------------------------------------------------------------------------

// Returns the number of a warp's units in a piece. Without keys it is 0. The piece of such a sequence has a unit, as some
// block has to write the empty state, but that unit has no place: the place called 0 may be no memory.
__device__ inline int units_of_warp(const Piece& piece, int warp) {
  if (!piece.has_keys()) return 0;
  return divide(max(0, piece.end_unit - piece.first_unit - warp + piece.stride - 1), piece.stride);
}

// Attends the warp's units of a piece, one after another.
template <class Shape>
__device__ void attend_piece(const DecodeCall& call, const KeyMaps& maps, const Piece& piece, const StagedQueries& staged,
                             Pipeline<Shape>& pipeline, RowState<Shape>& state) {
  const int warp = static_cast<int>(threadIdx.x / 32), n_units = units_of_warp(piece, warp);
  const int first = first_unit<Shape>(piece, warp);
  Places<Shape> places;
#pragma unroll
  for (int p = 0; p < kPlanes; ++p) places.head[p] = call.planes[p] + piece.head * call.head_stride[p];
  const auto ask = [&](int i, int stage) {
    if (i < n_units) ask_for_keys<Shape>(call, maps, piece, first, i, places, pipeline, stage);
  };
  expect_keys<Shape>(n_units * Shape::kKeys, state);
  LoadedQueries<Shape> loaded;
  loaded.load(call, piece);
#pragma unroll 1
  for (int i = 0; i < Shape::kStages; ++i) {
    const int stage = pipeline.stage + i;
    ask(i, stage < Shape::kStages ? stage : stage - Shape::kStages);
  }
  stage_queries<Shape>(call, loaded, staged);
  __syncthreads();
  const SeenKeys<Shape> seen = see_keys<Shape>(call, piece, staged.scale);
  for (int i = 0; i < n_units; ++i) {
    const int stage = pipeline.stage;
    wait_for_phase(pipeline.barrier(stage), static_cast<uint32_t>(pipeline.parity));
    const Stage at = {pipeline.box(stage), pipeline.scale(stage), pipeline.scaled};
    attend_unit<Shape>(call, seen, find_unit<Shape>(piece, seen.all_lo, seen.all_hi, first, i, places, at), staged, state);
    __syncwarp();
    ask(i + Shape::kStages, stage);
    pipeline.advance();
  }
}

// Prefetches the piece's first keys to the L2 cache, while the kernel before still ends. Its writes to the same lines go to
// that cache, too. Kernels do not write sequences and page tables (lib/tables/device.h). Where kernels write key lists, the
// caller has waited already.
template <class Shape>
__device__ void prefetch_piece(const DecodeCall& call, const Piece& piece) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int n_units = units_of_warp(piece, warp);
  Places<Shape> places;
  look_up<Shape>(call, piece, first_unit<Shape>(piece, warp), 0, places);
  constexpr int kLanes = Places<Shape>::kLanes, kRows = Shape::kKeys / kLanes;  // lanes of a unit; rows of each lane
  if (static_cast<int>(threadIdx.x % 32) >= kLanes * min(n_units, Shape::kStages)) return;
  const auto prefetch = [&](int p, int row_bytes) {
    const std::byte* const head = call.planes[p] + piece.head * call.head_stride[p];
    if (row_bytes > 0) prefetch_bytes(head + places.page + places.slot * row_bytes, row_bytes * kRows);
  };
  prefetch(kPlaneK, Shape::KRows::kRowBytes);
  prefetch(kPlaneKScales, 2 * Shape::kKScales);
  prefetch(kPlaneV, Shape::VRows::kRowBytes);
  prefetch(kPlaneVScales, 2 * Shape::kVScales);
}

template <class Shape>
__device__ __forceinline__ void decode(const DecodeCall& call, const KeyMaps& maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ __align__(8) uint64_t barriers[Shape::kWarps * Shape::kStages];
  __shared__ float scale[Shape::kRows];
  __shared__ int is_last;
  const int warp = static_cast<int>(threadIdx.x / 32), block = static_cast<int>(blockIdx.x);
  const StagedQueries staged = {reinterpret_cast<uint4*>(shared + Shape::kQAt), scale};
  auto* const warp_states = reinterpret_cast<float*>(shared);
  const uint32_t base = shared_address(shared);
  Pipeline<Shape> pipeline = {
      base + warp * Shape::kStages * Shape::kBoxBytes, base + Shape::kScalesAt + warp * Shape::kStages * Shape::kScaleBytes,
      base + Shape::kScaledAt + warp * Shape::kScaledBytes, shared_address(barriers + warp * Shape::kStages)};
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < Shape::kStages; ++i) init_barrier(pipeline.barrier(i));
    publish_barriers();
    if (warp == 0) {
      prefetch_map(maps.k), prefetch_map(maps.v);
      if (Shape::kHasLists) prefetch_map(maps.k_granule), prefetch_map(maps.v_granule);
      prefetch_line(call.sequences), prefetch_line(call.page_tables), prefetch_line(call.q.data);
    }
  }
  __syncwarp();
  let_next_kernel_start();
  bool has_waited = Shape::kHasLists && call.lists.are_written_by_kernels != 0;
  if (has_waited) wait_for_rows(call);
  const Share share = Share::make<Shape>(call);
  int at = share.is_by_item ? 0 : share.begin_of(block);
  const int end = share.is_by_item ? 1 : share.begin_of(block + 1);
  RowState<Shape> state;
  while (at < end) {
    const Piece piece = find_piece<Shape>(call, share, at);
    const int n_units = piece.end_unit - piece.first_unit;
    if (n_units == 0) break;  // more blocks than there is work for
    if (!has_waited) {
      prefetch_piece<Shape>(call, piece);
      wait_for_rows(call);
      has_waited = true;
    }
    clear(state);
    attend_piece<Shape>(call, maps, piece, staged, pipeline, state);
    __syncthreads();
    store_state<Shape>(state, warp_states + warp * Shape::kWarpFloats);
    __syncthreads();
    finish_piece<Shape>(call, piece, warp_states, &is_last);
    order_before_copies();
    __syncthreads();
    at = share.is_by_item ? end : at + n_units;
  }
  if (!has_waited) wait_for_rows(call);  // A block without work waits, too, as the next kernel waits for this one only.
  wait_for_append(call);
#endif
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    decode_sm90_kernel(const __grid_constant__ DecodeCall call, const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map) {
  decode<Shape>(call, {&k_map, &v_map});
}

// The kernel for key lists. The maps of granules bring eight rows, the other maps a unit.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    decode_lists_sm90_kernel(const __grid_constant__ DecodeCall call, const __grid_constant__ CUtensorMap k_map,
                             const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap k_granule_map,
                             const __grid_constant__ CUtensorMap v_granule_map) {
  decode<Shape>(call, {&k_map, &v_map, &k_granule_map, &v_granule_map});
}

}  // namespace tandem::cuda
