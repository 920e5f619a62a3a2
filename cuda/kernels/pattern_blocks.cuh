// SPDX-License-Identifier: MIT
// The scores of key blocks (lib/tables/pattern_lists.h, BLOCK_SPARSE): means of 64 keys and of 128 queries, and the
// products of all of them, in f32.
#pragma once

#include "cuda/kernels/pattern_job.cuh"
#include "cuda/kernels/search_keys.cuh"

namespace tandem::cuda {

// True if a query head of the KV head has the pattern.
__device__ inline bool is_for_blocks(const PatternCall& call, int kv_head) {
  bool is_for_any = false;
  for (int h = 0; h < call.group_size; ++h)
    is_for_any |= has_kind(call, kv_head * call.group_size + h, TANDEM_PATTERN_BLOCK_SPARSE);
  return is_for_any;
}

// A warp has a key block of one KV head, and 32 dims at a time. Lane 4 r + j has eight of these dims of every eighth key.
template <int32_t kType>
__global__ void __launch_bounds__(32 * kSearchWarps, 2) key_means_kernel(const __grid_constant__ PatternCall call) {
  begin_behind();
  const DeviceSequence& sequence = sequence_of(call);
  const PatternQueries queries(sequence);
  const int lane = static_cast<int>(threadIdx.x % 32), own = lane / 4, dim = call.keys.dim;
  const int block = static_cast<int>(blockIdx.x) * kSearchWarps + static_cast<int>(threadIdx.x / 32);
  const int kv_head = static_cast<int>(blockIdx.y);
  if (sequence.q_len == 0 || block >= queries.n_candidates(queries.n_blocks() - 1) || !is_for_blocks(call, kv_head)) return;
  int slot;
  const int64_t page = find_page(call.patterns.sequences, sequence, call.keys.page_len, block * kPatternKeyBlock, &slot);
  float* const to = call.key_means + (int64_t{kv_head} * call.n_key_blocks + block) * dim;
#pragma unroll 1
  for (int at = lane % 4 * kEight; at - lane % 4 * kEight < dim; at += kChunk) {
    float sums[kEight] = {};
#pragma unroll
    for (int key = 0; key < kPatternKeyBlock; key += 8) {
      RowPlaces place;
      find_key(call.keys, page, slot + key + own, kv_head, place, 0);
      StoredEight<kType> stored;
      stored.load(place.codes[0], place.scales[0], at, dim);
      float x[kEight];
      stored.widen(x);
#pragma unroll
      for (int i = 0; i < kEight; ++i) sums[i] = fmaf(x[i], stored.factor(), sums[i]);
    }
#pragma unroll
    for (int i = 0; i < kEight; ++i)
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], mask);
#pragma unroll
    for (int i = 0; i < kEight; i += kLaneNumbers)
      if (own == 0 && at + i < dim) {
        constexpr float kShare = 1.0f / kPatternKeyBlock;
        *reinterpret_cast<float4*>(to + at + i) =
            make_float4(sums[i] * kShare, sums[i + 1] * kShare, sums[i + 2] * kShare, sums[i + 3] * kShare);
      }
  }
}

// A block of threads has a query head and a block of its queries. A lane has four dims at a time.
static __global__ void __launch_bounds__(32 * kQueryMeanWarps) query_means_kernel(const __grid_constant__ PatternCall call) {
  begin_behind();
  __shared__ float4 of_warps[kQueryMeanWarps][32];
  const DeviceSequence& sequence = sequence_of(call);
  const PatternQueries queries(sequence);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32), dim = call.keys.dim;
  const int head = static_cast<int>(blockIdx.x), block = static_cast<int>(blockIdx.y);
  if (block >= queries.n_blocks() || !has_kind(call, head, TANDEM_PATTERN_BLOCK_SPARSE)) return;
  const DeviceRows& q = call.patterns.q;
  const int n = queries.block_end(block) - queries.block_begin(block);
  const int64_t row = int64_t{sequence.first_row} + block * kQueryBlock;
  float* const to = call.query_means + (int64_t{head} * call.n_query_blocks + block) * dim;
  for (int first = 0; first < dim; first += 32 * kLaneNumbers) {
    const int at = first + lane * kLaneNumbers;
    float sums[kLaneNumbers] = {};
#pragma unroll 4
    for (int t = warp; t < n && at < dim; t += kQueryMeanWarps) {
      float x[kLaneNumbers];
      widen_four(q.dtype, load_four(q.data, q.dtype, (row + t) * q.token_stride + head * q.head_stride + at), x);
#pragma unroll
      for (int i = 0; i < kLaneNumbers; ++i) sums[i] += x[i];
    }
    __syncthreads();
    of_warps[warp][lane] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    __syncthreads();
    if (warp > 0 || at >= dim) continue;
    float4 sum = of_warps[0][lane];
    for (int w = 1; w < kQueryMeanWarps; ++w) {
      const float4 of = of_warps[w][lane];
      sum.x += of.x, sum.y += of.y, sum.z += of.z, sum.w += of.w;
    }
    const float share = 1.0f / static_cast<float>(n);
    *reinterpret_cast<float4*>(to + at) = make_float4(sum.x * share, sum.y * share, sum.z * share, sum.w * share);
  }
}

// ---- scores --------------------------------------------------------------------------------------------------------------

inline constexpr int kScoreDims = 32, kScoreStride = kScoreTile + 4, kOfScoreThread = 4;
static_assert(kScoreTile / kOfScoreThread * (kScoreTile / kOfScoreThread) == 32 * kScoreWarps);

// Means of kScoreTile blocks, dim by dim.
using MeanTile = float[kScoreDims][kScoreStride];

// Brings dims [first_dim, first_dim + kScoreDims) of n rows to shared memory, and zeros elsewhere.
__device__ inline void bring_means(const float* rows, int n, int first_dim, int dim, MeanTile& to) {
  constexpr int kPieces = kScoreDims / 4;
  for (int i = static_cast<int>(threadIdx.x); i < kScoreTile * kPieces; i += 32 * kScoreWarps) {
    const int row = i / kPieces, at = i % kPieces * 4;
    float4 x = {};
    if (row < n && first_dim + at < dim)
      x = __ldcg(reinterpret_cast<const float4*>(rows + int64_t{row} * dim + first_dim + at));
    to[at][row] = x.x, to[at + 1][row] = x.y, to[at + 2][row] = x.z, to[at + 3][row] = x.w;
  }
}

// A block of threads has kScoreTile key blocks, as many blocks of queries, and a query head. A thread has 4 x 4 products.
static __global__ void __launch_bounds__(32 * kScoreWarps) score_blocks_kernel(const __grid_constant__ PatternCall call) {
  begin_behind();
  __shared__ alignas(16) MeanTile of_queries, of_keys;
  const DeviceSequence& sequence = sequence_of(call);
  const PatternQueries queries(sequence);
  const int head = static_cast<int>(blockIdx.x), dim = call.keys.dim;
  const int first_key = static_cast<int>(blockIdx.y) * kScoreTile, first_query = static_cast<int>(blockIdx.z) * kScoreTile;
  const int n_queries = min(queries.n_blocks() - first_query, kScoreTile);
  if (n_queries <= 0 || !has_kind(call, head, TANDEM_PATTERN_BLOCK_SPARSE)) return;
  const int n_keys = min(queries.n_candidates(first_query + n_queries - 1) - first_key, kScoreTile);
  if (n_keys <= 0) return;
  const int64_t first_row = int64_t{head} * call.n_query_blocks + first_query;
  const int64_t first_mean = int64_t{head / call.group_size} * call.n_key_blocks + first_key;
  const int own_query = static_cast<int>(threadIdx.x) / (kScoreTile / kOfScoreThread) * kOfScoreThread;
  const int own_key = static_cast<int>(threadIdx.x) % (kScoreTile / kOfScoreThread) * kOfScoreThread;
  float sums[kOfScoreThread][kOfScoreThread] = {};
#pragma unroll 1
  for (int first = 0; first < dim; first += kScoreDims) {
    __syncthreads();
    bring_means(call.query_means + first_row * dim, n_queries, first, dim, of_queries);
    bring_means(call.key_means + first_mean * dim, n_keys, first, dim, of_keys);
    __syncthreads();
#pragma unroll 8
    for (int d = 0; d < kScoreDims; ++d) {
      const float4 q = *reinterpret_cast<const float4*>(&of_queries[d][own_query]);
      const float4 k = *reinterpret_cast<const float4*>(&of_keys[d][own_key]);
      const float qs[kOfScoreThread] = {q.x, q.y, q.z, q.w}, ks[kOfScoreThread] = {k.x, k.y, k.z, k.w};
#pragma unroll
      for (int i = 0; i < kOfScoreThread; ++i)
#pragma unroll
        for (int j = 0; j < kOfScoreThread; ++j) sums[i][j] = fmaf(qs[i], ks[j], sums[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kOfScoreThread; ++i)
#pragma unroll
    for (int j = 0; j < kOfScoreThread; ++j)
      if (own_query + i < n_queries && own_key + j < n_keys)
        call.block_scores[(first_row + own_query + i) * call.n_key_blocks + first_key + own_key + j] =
            sums[i][j] * call.sm_scale;
}

}  // namespace tandem::cuda
