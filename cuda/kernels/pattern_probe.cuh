// SPDX-License-Identifier: MIT
// The weights that a head's last queries, its probes, give to all keys: sums for each token and for each band of distances
// (lib/tables/pattern_lists.h, VERTICAL_SLASH).
//
//   probe_sums_kernel      each probe's largest logit and sum of exponentials, over the keys of a piece
//   join_sums_kernel       each probe's log-sum-exp
//   probe_weights_kernel   weights, and their sums
//
// Both probe kernels walk over the keys and multiply them. The second one multiplies again, as K is in the cache for most
// heads of a group, and logits in memory would take as many bytes as K. A warp has a run of 16 tiles of 16 keys, and
// multiplies a tile with all 64 probes. No atomic operation adds numbers, so results are the same in every run.
// wide_probes.cuh has kernels for K and q in bf16 on compute capability 9.0. pattern_bands.cuh has the code that both kinds
// share.
//
// Keys are the columns of the matrix product, and probes its rows. Keys are used in memory order. Probes lie in shared
// memory in the order of the product.
//
//   lane 4 r + j    loads numbers 32 c + 8 j .. + 7 of keys r and r + 8 of a tile
//                   gets the products of probes r, r + 8, .. r + 56 and keys 2 j, 2 j + 1, 2 j + 8, 2 j + 9
#pragma once

#include <cfloat>

#include "cuda/kernels/pattern_bands.cuh"
#include "cuda/kernels/pattern_job.cuh"
#include "cuda/kernels/query_rows.cuh"
#include "cuda/kernels/radix_select.cuh"
#include "cuda/kernels/search_keys.cuh"

namespace tandem::cuda {

inline constexpr int kProbeChunks = 4;
static_assert(kSearchWarps * 32 >= kPatternProbes);

// The work of a block: a query head's probes, and a piece of its keys.
struct ProbeJob {
  const DeviceSequence* sequence;
  int head, kv_head;
  int end;                    // token behind the last key
  int n_probes, first_probe;  // token of the first probe
  int first_key, run;         // first token of the warp's run, and the number of the run
  int own, column;            // r and 2 j of the lane (above)

  // Finds the job. Returns false if the block has no work.
  __device__ bool find(const PatternCall& call) {
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    sequence = &sequence_of(call);
    head = static_cast<int>(blockIdx.x), kv_head = head / call.group_size;
    end = static_cast<int>(sequence->end);
    n_probes = min(kPatternProbes, sequence->q_len);
    first_probe = end - n_probes;
    run = static_cast<int>(blockIdx.y) * kSearchWarps + warp;
    first_key = run * kRunKeys;
    own = lane / 4, column = lane % 4 * 2;
    return n_probes > 0 && static_cast<int>(blockIdx.y) * kPieceKeys < end &&
           has_kind(call, head, TANDEM_PATTERN_VERTICAL_SLASH);
  }
  __device__ int n_tiles() const { return min(max(end - first_key + kProbeTile - 1, 0) / kProbeTile, kRunTiles); }
  // True if there are 64 probes and all of them see all keys of a tile.
  __device__ bool all_see(int first) const { return n_probes == kPatternProbes && first + kProbeTile - 1 <= first_probe; }
  __device__ bool sees(int first, int p, int h, int i) const {
    const int probe = own + 8 * p;
    return probe < n_probes && first + column + h + 8 * i <= first_probe + probe;
  }
  // Returns the distance of the lane's first probe and its key 2 j + h, less whole bands (pattern_bands.cuh).
  __device__ int band_place(int h) const { return first_probe % kPatternBand + own - column - h; }
  __device__ QueryRows probes(const DeviceRows& q) const {
    const int64_t row = int64_t{sequence->first_row} + sequence->q_len - n_probes;
    return {&q, row * q.token_stride + head * q.head_stride, 1, n_probes};
  }
};

// The products of a tile, of 16 probes and eight keys each. Not scaled yet.
using TileLogits = float[kProbeGroups / 2][kKeys][4];
__device__ inline float logit_of(const TileLogits& logits, int p, int h, int i) { return logits[p / 2][i][p % 2 * 2 + h]; }

// Returns probes in shared memory: [16 probes][chunks of all steps][parts][halves of a chunk][lanes].
template <int kQueryParts>
__device__ inline uint4* probes_at(int sixteen, int n_chunks, int chunk) {
  return query_tiles + (sixteen * n_chunks + chunk) * (kQueryParts * 2 * 32) + threadIdx.x % 32;
}

// Brings the probes to shared memory. All threads of the block take part.
template <int kQueryParts>
__device__ inline void bring_probes(const PatternCall& call, const ProbeJob& job) {
  const int n_chunks = SixteenRows<TANDEM_BF16, kProbeChunks>::n_steps(call.keys.dim) * kProbeChunks;
  const QueryRows rows = job.probes(call.patterns.q);
  for (int i = static_cast<int>(threadIdx.x / 32); i < kProbeGroups / 2 * n_chunks; i += kSearchWarps) {
    const int at = i % n_chunks * kChunk + job.column * (kEight / 2);
    uint32_t parts[2][kQueryParts][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = i / n_chunks * 16 + half * 8 + job.own;
      float x[kEight];
      read_four<false>(rows, row, at, call.keys.dim, x);
      read_four<false>(rows, row, at + kLaneNumbers, call.keys.dim, x + kLaneNumbers);
      split_eight(x, parts[half]);
    }
    uint4* const to = probes_at<kQueryParts>(i / n_chunks, n_chunks, i % n_chunks);
#pragma unroll
    for (int r = 0; r < kQueryParts; ++r)
#pragma unroll
      for (int w = 0; w < 4; w += 2)
        to[(2 * r + w / 2) * 32] = make_uint4(parts[0][r][w], parts[1][r][w], parts[0][r][w + 1], parts[1][r][w + 1]);
  }
  __syncthreads();
}

// 16 rows of K.
template <int32_t kType>
struct SplitRows {
  using Stored = StoredEight<kType>;
  uint32_t parts[kProbeChunks][kKeys][Stored::kParts][4];
  uint32_t factors[kProbeChunks][kKeys];  // a pair in f16, of the keys whose products the lane gets

  __device__ void load(const RowPlaces& places, int step, int n) {
    SixteenRows<kType, kProbeChunks> rows;
    rows.load(places, step, n);
#pragma unroll
    for (int c = 0; c < kProbeChunks; ++c)
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        rows.stored[c][i].split_up(parts[c][i]);
        if constexpr (Stored::kHasScale) {
          const int from = static_cast<int>(threadIdx.x) % 4 * 8;  // lane 4 r has key r
          factors[c][i] = __byte_perm(__shfl_sync(~0u, rows.stored[c][i].scale, from),
                                      __shfl_sync(~0u, rows.stored[c][i].scale, from + 4), 0x5410);
        }
      }
  }
  // Adds the products of 16 probes over the dims of a chunk. Products of the probes' small parts come first. Products of
  // two parts that lie below the last bit of an f32 are left out.
  template <int kQueryParts>
  __device__ void multiply(int chunk, const uint4* probes, float (&logits)[kKeys][4]) const {
    constexpr int kLeast = Stored::kParts > kQueryParts ? Stored::kParts : kQueryParts;
    float products[kKeys][4] = {};
    float(&sums)[kKeys][4] = Stored::kHasScale ? products : logits;
#pragma unroll
    for (int r = kQueryParts - 1; r >= 0; --r)
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        const uint4 four = probes[(2 * r + w / 2) * 32];
        const uint32_t a[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int p = Stored::kParts - 1; p >= 0; --p)
#pragma unroll
          for (int i = 0; i < kKeys; ++i)
            if (p + r < kLeast) Bfloat::multiply(sums[i], a, {parts[chunk][i][p][w], parts[chunk][i][p][w + 1]});
      }
#pragma unroll
    for (int i = 0; i < kKeys && Stored::kHasScale; ++i) {
      const float2 pair = Half::unpack(factors[chunk][i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) logits[i][k] = fmaf(k % 2 == 0 ? pair.x : pair.y, products[i][k], logits[i][k]);
    }
  }
};

// Calls take(t, logits) for each tile of the warp's run. Rows behind the sequence's end are not read: the last row takes
// their place.
template <int32_t kType, int kQueryParts, class Take>
__device__ inline void walk_run(const PatternCall& call, const ProbeJob& job, Take& take) {
  constexpr int kPageTiles = kPatternKeyBlock / kProbeTile;  // tiles that are always in one page
  const int lane = static_cast<int>(threadIdx.x % 32), dim = call.keys.dim, n_tiles = job.n_tiles();
  const int n_steps = SixteenRows<kType, kProbeChunks>::n_steps(dim);
  if (n_tiles == 0) return;
  int slot;
  const int asked = job.first_key + lane % (kRunTiles / kPageTiles) * kPatternKeyBlock;
  const int64_t page = find_page(call.patterns.sequences, *job.sequence, call.keys.page_len, min(asked, job.end - 1), &slot);
#pragma unroll 1
  for (int t = 0; t < n_tiles; ++t) {
    const int last = job.end - 1 - (job.first_key + t * kProbeTile);
    const int64_t tile_page = __shfl_sync(~0u, page, t / kPageTiles);
    const int tile_slot = __shfl_sync(~0u, slot, t / kPageTiles) + t % kPageTiles * kProbeTile;
    RowPlaces places;
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
      find_key(call.keys, tile_page, tile_slot + min(job.own + 8 * i, last), job.kv_head, places, i);
    TileLogits logits = {};
#pragma unroll 1
    for (int step = 0; step < n_steps; ++step) {
      SplitRows<kType> rows;
      rows.load(places, step, dim);
#pragma unroll
      for (int p = 0; p < kProbeGroups / 2; ++p)
#pragma unroll
        for (int c = 0; c < kProbeChunks; ++c)
          rows.template multiply<kQueryParts>(c, probes_at<kQueryParts>(p, n_steps * kProbeChunks, step * kProbeChunks + c),
                                              logits[p]);
    }
    take(t, logits);
  }
}

// ---- sums of exponentials ------------------------------------------------------------------------------------------------

// Sums of exponentials of the lane's probes, over the lane's keys.
struct ProbeSums {
  const ProbeJob& job;
  float scale;
  float_pair of[kProbeGroups];

  __device__ ProbeSums(const ProbeJob& of_job, float of_scale) : job(of_job), scale(of_scale) {
#pragma unroll
    for (int p = 0; p < kProbeGroups; ++p) of[p] = {-FLT_MAX, 0.0f};
  }
  template <bool kAllSee>
  __device__ void add(int first, const TileLogits& logits) {
#pragma unroll
    for (int p = 0; p < kProbeGroups; ++p) {
      float x[kKeys][2], most = of[p].most, sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kKeys; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[i][h] = logit_of(logits, p, h, i) * scale;
          if (!kAllSee && !job.sees(first, p, h, i)) x[i][h] = -INFINITY;
          most = fmaxf(most, x[i][h]);
        }
#pragma unroll
      for (int i = 0; i < kKeys; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) sum += exp2_fast(x[i][h] - most);
      of[p] = {most, fmaf(of[p].sum, exp2_fast(of[p].most - most), sum)};
    }
  }
  __device__ void operator()(int t, const TileLogits& logits) {
    const int first = job.first_key + t * kProbeTile;
    if (job.all_see(first))
      add<true>(first, logits);
    else
      add<false>(first, logits);
  }
  // Adds up the sums of all lanes and warps, in the place of the query rows, and leaves the block's sums in the work space.
  __device__ void leave(const PatternCall& call) {
    auto* const of_warps = reinterpret_cast<float_pair*>(query_tiles);  // [warps][probes]
    __syncthreads();
#pragma unroll
    for (int p = 0; p < kProbeGroups; ++p) {
      float_pair sum = of[p];
      for (int mask = 1; mask < 4; mask *= 2)
        add_pair(sum, {__shfl_xor_sync(~0u, sum.most, mask), __shfl_xor_sync(~0u, sum.sum, mask)});
      if (job.column == 0) of_warps[threadIdx.x / 32 * kPatternProbes + 8 * p + job.own] = sum;
    }
    __syncthreads();
    const int probe = static_cast<int>(threadIdx.x);
    if (probe >= job.n_probes) return;
    float_pair sum = of_warps[probe];
    for (int w = 1; w < kSearchWarps; ++w) add_pair(sum, of_warps[w * kPatternProbes + probe]);
    call.sums[(int64_t{job.head} * call.n_sums + blockIdx.y) * kPatternProbes + probe] = sum;
  }
};

// Blocks of a multiprocessor, limited by registers: keys whose numbers have several parts take many.
template <int32_t kType>
constexpr int kProbeBlocks = StoredEight<kType>::kParts > 1 ? 1 : 2;

template <int32_t kType, int kQueryParts>
__global__ void __launch_bounds__(32 * kSearchWarps, kProbeBlocks<kType>)
    probe_sums_kernel(const __grid_constant__ PatternCall call) {
  begin_behind();
  ProbeJob job;
  if (!job.find(call)) return;
  bring_probes<kQueryParts>(call, job);
  ProbeSums sums(job, call.sm_scale * kLog2E);
  walk_run<kType, kQueryParts>(call, job, sums);
  sums.leave(call);
}

// Joins the sums of a query head, a probe for each thread. Also clears the counts that choose the head's tokens.
__device__ inline void join_sums(const PatternCall& call) {
  const int head = static_cast<int>(blockIdx.x), probe = static_cast<int>(threadIdx.x);
  const DeviceSequence& sequence = sequence_of(call);
  if (!has_kind(call, head, TANDEM_PATTERN_VERTICAL_SLASH)) return;
  for (int b = probe; b < kChoices * kDigits * kBins; b += kPatternProbes)
    call.bins[head * (kChoices * kDigits * kBins) + b] = 0;
  if (probe >= sequence.q_len) return;
  const int n_pieces = static_cast<int>((sequence.end + kPieceKeys - 1) / kPieceKeys);
  const float_pair* const from = call.sums + int64_t{head} * call.n_sums * kPatternProbes + probe;
  float_pair sum = {-FLT_MAX, 0.0f};
#pragma unroll 8
  for (int p = 0; p < n_pieces; ++p) {
    const float2 of = __ldcg(reinterpret_cast<const float2*>(from + int64_t{p} * kPatternProbes));
    add_pair(sum, {of.x, of.y});
  }
  call.lse[head * kPatternProbes + probe] = sum.most + log2f(sum.sum);
}

static __global__ void __launch_bounds__(kPatternProbes) join_sums_kernel(const __grid_constant__ PatternCall call) {
  begin_behind();
  join_sums(call);
}

// ---- weights -------------------------------------------------------------------------------------------------------------

__device__ inline float sum_over_lanes(float x) {
  for (int mask = 1; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

struct ProbeWeights {
  const ProbeJob& job;
  const float* minus_lse;  // [kPatternProbes], in shared memory
  float scale;
  float *columns, *run_bands;
  BandSums bands;

  template <bool kAllSee>
  __device__ void add(int first, const TileLogits& logits, float (&sums)[kKeys][2]) {
#pragma unroll
    for (int p = kProbeGroups - 1; p >= 0; --p) {
      const float minus = minus_lse[8 * p + job.own];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float weights[kKeys];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          weights[i] = exp2_fast(fmaf(logit_of(logits, p, h, i), scale, minus));
          if (!kAllSee && !job.sees(first, p, h, i)) weights[i] = 0.0f;
          sums[i][h] += weights[i];
        }
        bands.add(p, h, weights[0], weights[1]);
      }
    }
  }
  // Sums over the lanes that have the same keys. Each lane gets the sum of one key.
  __device__ void leave_columns(int first, const float (&sums)[kKeys][2]) {
    const int lane = static_cast<int>(threadIdx.x % 32), i = lane / 4 % 2, h = lane / 8 % 2;
    float of_keys[2];
#pragma unroll
    for (int k = 0; k < 2; ++k)
      of_keys[k] = (i == 0 ? sums[0][k] : sums[1][k]) + __shfl_xor_sync(~0u, i == 0 ? sums[1][k] : sums[0][k], 4);
    float sum = (h == 0 ? of_keys[0] : of_keys[1]) + __shfl_xor_sync(~0u, h == 0 ? of_keys[1] : of_keys[0], 8);
    sum += __shfl_xor_sync(~0u, sum, 16);
    const int token = first + job.column + h + 8 * i;
    if (lane < 16 && token < job.end) columns[token] = sum;
  }
  __device__ void operator()(int t, const TileLogits& logits) {
    const int first = job.first_key + t * kProbeTile, lane = static_cast<int>(threadIdx.x % 32);
    float sums[kKeys][2] = {};
    if (job.all_see(first))
      add<true>(first, logits, sums);
    else
      add<false>(first, logits, sums);
    leave_columns(first, sums);
    const float band = sum_over_lanes(bands.finish_band());
    if (lane == 0) run_bands[t] = band;
  }
  // Finishes the bands that the run's last keys have begun.
  __device__ void finish() {
    const int n_tiles = job.n_tiles();
#pragma unroll 1
    for (int t = n_tiles; t < n_tiles + kRunBands - kRunTiles; ++t) {
      bands.pass();
      const float band = sum_over_lanes(bands.finish_band());
      if (threadIdx.x % 32 == 0) run_bands[t] = band;
    }
  }
};

template <int32_t kType, int kQueryParts>
__global__ void __launch_bounds__(32 * kSearchWarps, kProbeBlocks<kType>)
    probe_weights_kernel(const __grid_constant__ PatternCall call) {
  begin_behind();
  ProbeJob job;
  if (!job.find(call)) return;
  __shared__ alignas(8) float minus_lse[kPatternProbes];
  const int probe = static_cast<int>(threadIdx.x);
  if (probe < kPatternProbes)
    minus_lse[probe] = probe < job.n_probes ? -__ldcg(call.lse + job.head * kPatternProbes + probe) : 0.0f;
  bring_probes<kQueryParts>(call, job);
  if (job.n_tiles() == 0) return;
  ProbeWeights weights = {job,
                          minus_lse,
                          call.sm_scale * kLog2E,
                          call.columns + job.head * call.patterns.sequences.max_keys,
                          call.bands + (int64_t{job.head} * call.n_runs + job.run) * kRunBands,
                          BandSums(job.band_place(0), job.band_place(1))};
  walk_run<kType, kQueryParts>(call, job, weights);
  weights.finish();
}

}  // namespace tandem::cuda
