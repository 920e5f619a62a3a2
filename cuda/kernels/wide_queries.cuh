// SPDX-License-Identifier: MIT
// Products of rows of bounds or keys and of many query rows, all bf16 (compute capability 9.0). Each of a block's two
// warpgroups multiplies
//
//   a   64 rows, in stages of shared memory, 64 numbers of each row at a time; each of its warps has found 16 of them
//   b   64 rows of each of kHeads query heads, in shared memory: row 64 h + i is query i of head h
//   d   a thread has the products of its two rows with a quarter of the query rows (C fragments of warp_ops.cuh)
//
// Rows lie in shared memory as in wgmma.cuh.
#pragma once

#include "cuda/kernels/search_judges.cuh"
#include "cuda/kernels/wgmma.cuh"

namespace tandem::cuda {

inline constexpr int kGroupWarps = 4;               // warps of a warpgroup
inline constexpr int kPieces = kWideStep / kEight;  // 16-byte pieces that a row has of a step

extern __shared__ __align__(1024) std::byte wide_space[];

// Addresses in shared memory: the stages of the warpgroups, and the query rows behind them.
__device__ inline uint32_t wide_stages() { return (shared_address(wide_space) + 1023) / 1024 * 1024; }
__device__ inline uint32_t wide_rows() { return wide_stages() + kWideGroups * kWideStages * kWideStageBytes; }
__device__ inline int n_wide_steps(int n_numbers) { return (n_numbers + kWideStep - 1) / kWideStep; }

// Keeps one side of two neighbouring numbers of a query row. With is_upper, it keeps numbers above 0, which multiply the
// largest numbers of a row of bounds. Otherwise it keeps numbers below 0, which multiply the smallest ones. Other numbers
// become 0.
__device__ inline uint32_t numbers_of_side(uint32_t pair, bool is_upper) {
  const uint32_t below = ((pair & 0x8000u) != 0 ? 0xffffu : 0u) | ((pair & 0x80000000u) != 0 ? 0xffff0000u : 0u);
  return pair & (is_upper ? ~below : below);
}

// Brings the query rows of heads [first_head, first_head + kHeads) of the block's KV head to shared memory. The last
// existing head or query takes the place of missing ones, which changes no maximum. All threads of the block take part.
template <int kHeads, bool kIsOfBounds>
__device__ inline void bring_wide(const SearchCall& call, const SearchJob& job, int first_head) {
  constexpr int kRows = kHeads * kHeadRows;
  const DeviceRows& q = call.search.q;
  const int dim = call.keys.dim, n_steps = n_wide_steps(kIsOfBounds ? 2 * dim : dim);
  constexpr int kRowsAtOnce = 32 * kSearchWarps / kPieces, kTurns = kRows / kRowsAtOnce;
  const int first_row = static_cast<int>(threadIdx.x) / kPieces, piece = static_cast<int>(threadIdx.x) % kPieces;
  const auto* const first = static_cast<const __nv_bfloat16*>(q.data) + job.sequence.first_row * q.token_stride +
                            int64_t{blockIdx.y} * call.group_size * q.head_stride;
  uint32_t to = wide_rows() + swizzled(first_row, piece);
  __syncthreads();
  for (int step = 0; step < n_steps; ++step, to += kRows * kSwizzledRow) {
    const int number = step * kWideStep + piece * kEight;
    const bool is_upper = kIsOfBounds && number >= dim;
    const int at = number - (is_upper ? dim : 0);
    uint4 x[kTurns] = {};
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int row = first_row + i * kRowsAtOnce, head = min(first_head + row / kHeadRows, call.group_size - 1);
      const int query = min(row % kHeadRows, job.sequence.q_len - 1);
      if (at < dim) x[i] = __ldg(reinterpret_cast<const uint4*>(first + query * q.token_stride + head * q.head_stride + at));
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (kIsOfBounds) {
        x[i].x = numbers_of_side(x[i].x, is_upper), x[i].y = numbers_of_side(x[i].y, is_upper);
        x[i].z = numbers_of_side(x[i].z, is_upper), x[i].w = numbers_of_side(x[i].w, is_upper);
      }
      store_words(to + i * (kRowsAtOnce * kSwizzledRow), x[i].x, x[i].y, x[i].z, x[i].w);  // kRowsAtOnce is a multiple of 8
    }
  }
  fence_products();
  __syncthreads();
}

template <class Places>
__device__ inline uint32_t rows_at(const Places& places, int i) {
  if constexpr (requires { places.rows_at(i); })
    return places.rows_at(i);
  else
    return 0;
}

// The addresses of the rows of a warp's next items. They are found for several items at once, as an address takes two
// dependent loads from memory. If the last bit of an address is set, the row does not count, and the address is that of
// another row, which may be read.
inline constexpr int kFoundItems = 8;
using FoundRows = uintptr_t[kFoundItems][kTileKeys];
inline constexpr uintptr_t kIsPadding = 1;

// Returns the lane's two rows of item i. Called for items in their order. find(i, row) returns the address of row 0 .. 15
// of item i. Bit k of *there: the lane's k-th row counts.
template <class Find>
__device__ __forceinline__ RowPlaces find_item(FoundRows& found, int i, Find find, uint32_t* there) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (i % kFoundItems == 0) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kFoundItems * kTileKeys / 32; ++j) {
      const int at = 32 * j + lane;
      found[at / kTileKeys][at % kTileKeys] = find(i + at / kTileKeys, at % kTileKeys);
    }
    __syncwarp();
  }
  RowPlaces places = {};
  *there = 0;
#pragma unroll
  for (int k = 0; k < kKeys; ++k) {
    const uintptr_t at = found[i % kFoundItems][lane / 4 + 8 * k];
    if ((at & kIsPadding) == 0) *there |= 1u << k;
    places.codes[k] = reinterpret_cast<const std::byte*>(at & ~kIsPadding);
  }
  return places;
}

// Copies a step of the lane's two rows to a stage. Four lanes share a row: each copies every fourth piece of 16 bytes. to:
// place of the lane's first piece. All warps of a warpgroup call this.
__device__ inline void copy_step(const RowPlaces& from, int step, int n_numbers, uint32_t to) {
  const int own = static_cast<int>(threadIdx.x % 4) * kEight + step * kWideStep;
#pragma unroll
  for (int i = 0; i < kKeys; ++i)
#pragma unroll
    for (int j = 0; j < kPieces / 4; ++j)
      copy_async<16>((to ^ j * 64) + i * (8 * kSwizzledRow), from.codes[i] + 2 * (own + 32 * j), own + 32 * j < n_numbers);
}
// Returns where a lane's first piece lies in a stage: bytes from its start.
__device__ inline uint32_t lane_offset() {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32) % kGroupWarps;
  return swizzled(warp * kTileKeys + lane / 4, lane % 4);
}
// Returns the stage behind `stage`, both as bytes from the first one.
__device__ inline uint32_t next_stage(uint32_t stage) {
  return stage == (kWideStages - 1) * kWideStageBytes ? 0 : stage + kWideStageBytes;
}

// Sets or adds to d the products of a stage with kWidth query rows. The first step sets d. q: the first of kRows query
// rows.
template <int kRows, int kWidth>
__device__ __forceinline__ void multiply_step(uint32_t stage, uint32_t q, int step, float (&d)[kWidth / 2]) {
  begin_products();
#pragma unroll
  for (int k = 0; k < kWideStep / 16; ++k)
    Wgmma<Bfloat, kWidth>::keys(d, describe_matrix(stage + 32 * k, 16),
                                describe_matrix(q + step * (kRows * kSwizzledRow) + 32 * k, 16), step > 0 || k > 0);
  commit_products();
}

// Multiplies the rows of many places, and loads the next ones meanwhile. Places has, for i in [0, n()), open(i), which
// returns the lane's two rows, and take(i, d), which uses their products. It may have rows_at(i), the place of the query
// rows from q on. All warps of a warpgroup have the same n(). open(i + 3) may come before take(i). n_numbers: of a row.
template <int kRows, int kWidth, class Places>
__device__ __forceinline__ void walk_wide(Places& places, uint32_t q, int n_numbers) {
  const int n_steps = n_wide_steps(n_numbers), n_items = places.n(), n_units = n_items * n_steps;
  if (n_units <= 0) return;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x / (32 * kGroupWarps)), 0);
  const uint32_t stages = wide_stages() + group * (kWideStages * kWideStageBytes);
  float d[kWidth / 2];
  RowPlaces next = places.open(0);
  int next_at = 0, next_step = 0, at = 0, step = 0;
  uint32_t stage = 0, next_copied = 0;
  const uint32_t own = stages + lane_offset();
  const auto copy = [&](int unit) {
    if (unit < n_units) copy_step(next, next_step, n_numbers, own + next_copied);
    next_copied = next_stage(next_copied);
    commit_copies();
  };
  const auto find_next = [&] {
    if (++next_step < n_steps) return;
    next_step = 0;
    if (++next_at < n_items) next = places.open(next_at);
  };
  copy(0);
  find_next();
  copy(1);
  find_next();
#pragma unroll 1
  for (int unit = 0; unit < n_units; ++unit) {
    wait_for_copies<1>();
    fence_products();
    sync_threads(1 + group, 32 * kGroupWarps);  // all warps have multiplied the stage that the next copy writes to
    copy(unit + 2);
    multiply_step<kRows, kWidth>(stages + stage, q + rows_at(places, at), step, d);
    stage = next_stage(stage);
    find_next();
    wait_for_products<0>();
    pin(d);
    if (++step < n_steps) continue;
    places.take(at++, d);
    step = 0;
  }
  wait_for_copies<0>();
  sync_threads(1 + group, 32 * kGroupWarps);  // the next walk's first copies overwrite stages that warps may still multiply
}

}  // namespace tandem::cuda
