// SPDX-License-Identifier: MIT
// Probe kernels (pattern_probe.cuh) for K and q in bf16 on compute capability 9.0. A block multiplies the probes of up to
// four query heads of a KV head at once, so K is read once for them. wide_probe_kernel<kGroups, kIsOfSums> makes
//
//   sums      each probe's largest logit and sum of exponentials, over the keys of a block
//   weights   after it: each probe's log-sum-exp of these; sums of weights
//
//   kGroups warpgroups   have a query head each. Warp w of each has the w-th of four runs of keys
//   a last warpgroup     its first warp makes the copy engine bring 16 keys of each of the four runs: a stage. Its other
//   warps
//                        exist so that the warps that add up get their registers
//
// A warpgroup multiplies a stage's 64 keys with its probes. Keys are the rows of the product, and probes its columns:
//
//   lane 4 r + j    gets the products of keys r, r + 8 of its run's tile and probes 2 j + 8 n, 2 j + 8 n + 1, n from 0 to 7
//
// On an H100 a pass over 131,072 keys of 8 KV heads takes 0.19 ms with 32 query heads. Bringing the keys alone takes 0.10
// ms. It hides the products alone, and it hides 2^x alone (0.12), but not both together. That holds whether two warpgroups
// take turns, a warpgroup multiplies a stage ahead, or four warpgroups run freely as here.
#pragma once

#include <cfloat>

#include "cuda/kernels/pattern_bands.cuh"
#include "cuda/kernels/pattern_job.cuh"
#include "cuda/kernels/query_rows.cuh"
#include "cuda/kernels/radix_select.cuh"
#include "cuda/kernels/search_keys.cuh"
#include "cuda/kernels/wgmma.cuh"

namespace tandem::cuda {

inline constexpr int kGroupWarps = 4;  // warps of a warpgroup
inline constexpr int kGroupThreads = 32 * kGroupWarps;
inline constexpr int kBoxBytes = kProbeTile * kSwizzledRow;  // 64 numbers of the keys of a tile
static_assert(kWideRuns == kGroupWarps);

extern __shared__ __align__(1024) std::byte probe_space[];

// The work of a block: some query heads of a KV head, and pieces of 4 runs of its keys.
struct WideJob {
  const DeviceSequence* sequence;
  int kv_head, first_head, n_heads;  // query heads
  int end;                           // token behind the last key
  int n_probes, first_probe;         // token of the first probe
  int n_tiles;                       // tiles of the first runs of all its pieces

  // Finds the job. Returns false if the block has no work.
  __device__ bool find(const PatternCall& call, int most_heads) {
    sequence = &sequence_of(call);
    kv_head = static_cast<int>(blockIdx.y);
    const int of_group = static_cast<int>(blockIdx.z) * most_heads;
    first_head = kv_head * call.group_size + of_group;
    n_heads = min(most_heads, call.group_size - of_group);
    end = static_cast<int>(sequence->end);
    n_probes = min(kPatternProbes, sequence->q_len);
    first_probe = end - n_probes;
    const int n_pieces = n_wide_pieces(end), own = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
    n_tiles = 0;
    if (own < n_pieces) {
      const int n_more = (n_pieces - 1 - own) / step, last = own + n_more * step;
      n_tiles = n_more * kRunTiles + min(kRunTiles, (end - last * kWidePieceKeys + kProbeTile - 1) / kProbeTile);
    }
    bool has_any = false;
    for (int h = 0; h < n_heads; ++h) has_any |= has_kind(call, first_head + h, TANDEM_PATTERN_VERTICAL_SLASH);
    return n_probes > 0 && has_any;
  }
  __device__ static int n_wide_pieces(int end) { return (end + kWidePieceKeys - 1) / kWidePieceKeys; }
  // The i-th tile of all pieces: its run, and its first token.
  __device__ static int run(int i, int warp) {
    return (static_cast<int>(blockIdx.x) + i / kRunTiles * static_cast<int>(gridDim.x)) * kGroupWarps + warp;
  }
  __device__ static int first_token(int i, int warp) { return run(i, warp) * kRunKeys + i % kRunTiles * kProbeTile; }
  // True if there are 64 probes and all of them see all keys of a tile.
  __device__ bool all_see(int first) const { return n_probes == kPatternProbes && first + kProbeTile - 1 <= first_probe; }
};

// Shared memory: probes [heads][steps of 64 numbers][probes], then stages [steps][64 keys].
struct WideSpace {
  uint32_t rows, stages, barriers;
  int n_steps, n_stages, stage_bytes;

  __device__ WideSpace(int dim, int n_heads, int of_stages, const uint64_t* of_barriers) {
    n_steps = (dim + kWideStep - 1) / kWideStep;
    n_stages = of_stages;
    stage_bytes = n_steps * kGroupWarps * kBoxBytes;
    rows = (shared_address(probe_space) + 1023) / 1024 * 1024;
    stages = rows + n_heads * n_steps * kPatternProbes * kSwizzledRow;
    barriers = shared_address(of_barriers);
  }
  __device__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return barriers + 8 * (kMostProbeStages + stage); }
  __device__ uint32_t stage(int i) const { return stages + i * stage_bytes; }
};

// A place among the stages, which are used round after round.
struct StageTurn {
  int stage = 0, parity = 0;
  __device__ void advance(int n_stages) {
    if (++stage < n_stages) return;
    stage = 0;
    parity ^= 1;
  }
};

// Brings all stages. One warp runs this. A tile at the end may have keys behind the sequence's end, as the page has room
// for them. A tile without any key is not brought.
__device__ inline void bring_keys(const PatternCall& call, const CUtensorMap* map, const WideJob& job,
                                  const WideSpace& space) {
  constexpr int kPageTiles = kPatternKeyBlock / kProbeTile;  // tiles that are always in one page
  const int lane = static_cast<int>(threadIdx.x % 32), tile = lane % kGroupWarps;
  const uint64_t policy = reused_policy();
  StageTurn turn;
  int64_t page = 0;
  int slot = 0;
#pragma unroll 1
  for (int i = 0; i < job.n_tiles; ++i) {
    const int token = job.first_token(i, tile);
    const bool is_there = lane < kGroupWarps * space.n_steps && token < job.end;
    if (i % kPageTiles == 0 && is_there)
      page = find_page(call.patterns.sequences, *job.sequence, call.keys.page_len, token, &slot);
    if (i >= space.n_stages) wait_for_phase(space.empty(turn.stage), turn.parity ^ 1);
    const int n_boxes = __popc(__ballot_sync(~0u, is_there));
    if (lane == 0) expect_bytes(space.full(turn.stage), n_boxes * kBoxBytes);
    __syncwarp();
    if (is_there) {
      RowPlaces places;
      find_key(call.keys, page, slot + i % kPageTiles * kProbeTile, job.kv_head, places, 0);
      const int step = lane / kGroupWarps;
      copy_box(space.stage(turn.stage) + (step * kGroupWarps + tile) * kBoxBytes, map, step * kSwizzledRow, places.codes[0],
               space.full(turn.stage), policy);
    }
    turn.advance(space.n_stages);
  }
}

// Brings all probes, with 0 for missing ones. All warpgroups that multiply take part.
template <int kGroups>
__device__ inline void bring_wide_probes(const PatternCall& call, const WideJob& job, const WideSpace& space) {
  constexpr int kPieces = kWideStep / kEight;
  const DeviceRows& q = call.patterns.q;
  const auto* const first = static_cast<const __nv_bfloat16*>(q.data) +
                            (int64_t{job.sequence->first_row} + job.sequence->q_len - job.n_probes) * q.token_stride;
  const int of_row = space.n_steps * kPieces, n = kGroups * kPatternProbes * of_row;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kGroups * kGroupThreads) {
    const int row = i / of_row, at = i % of_row, head = row / kPatternProbes, probe = row % kPatternProbes;
    uint4 x = {};
    if (head < job.n_heads && probe < job.n_probes && at * kEight < call.keys.dim)
      x = __ldg(reinterpret_cast<const uint4*>(first + probe * q.token_stride + (job.first_head + head) * q.head_stride +
                                               at * kEight));
    const int block = head * space.n_steps + at / kPieces;
    store_words(space.rows + block * (kPatternProbes * kSwizzledRow) + swizzled(probe, at % kPieces), x.x, x.y, x.z, x.w);
  }
  fence_products();
  sync_threads(1, kGroups * kGroupThreads);
}

// A lane's part of the products of a tile.
using WideLogits = float[kPatternProbes / 2];

// Calls take(i, d) for each tile of the warp's runs. d has the products of its keys with the warpgroup's probes.
template <class Take>
__device__ __forceinline__ void walk_keys(const WideJob& job, const WideSpace& space, Take& take) {
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int warp = static_cast<int>(threadIdx.x / 32) % kGroupWarps;
  const uint32_t rows = space.rows + group * (space.n_steps * kPatternProbes * kSwizzledRow);
  StageTurn turn;
  WideLogits d;
#pragma unroll 1
  for (int i = 0; i < job.n_tiles; ++i) {
    const uint32_t stage = space.stage(turn.stage);
    wait_for_phase(space.full(turn.stage), turn.parity);
    begin_products();
#pragma unroll 1
    for (int step = 0; step < space.n_steps; ++step)
#pragma unroll
      for (int k = 0; k < kWideStep / 16; ++k)
        Wgmma<Bfloat, kPatternProbes>::keys(d, describe_matrix(stage + step * (kGroupWarps * kBoxBytes) + 32 * k, 16),
                                            describe_matrix(rows + step * (kPatternProbes * kSwizzledRow) + 32 * k, 16),
                                            step > 0 || k > 0);
    commit_products();
    wait_for_products<0>();
    pin(d);
    if (threadIdx.x % 32 == 0) arrive(space.empty(turn.stage));
    turn.advance(space.n_stages);
    if (job.first_token(i, warp) < job.end) take(i, d);
  }
}

// The lane's keys and probes.
struct WideLane {
  int warp, row, column, head;  // w; r; 2 j; index of the warpgroup's head in the block

  __device__ WideLane() {
    const int lane = static_cast<int>(threadIdx.x % 32);
    warp = static_cast<int>(threadIdx.x / 32) % kGroupWarps;
    row = lane / 4, column = lane % 4 * 2;
    head = static_cast<int>(threadIdx.x) / kGroupThreads;
  }
};

// Which of the lane's probes see which of its keys, in a tile that begins with token `first`.
struct Sight {
  int from[kKeys], end;  // bounds of 8 n + h

  __device__ Sight(const WideJob& job, const WideLane& lane, int first) : end(job.n_probes - lane.column) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) from[i] = first + lane.row + 8 * i - job.first_probe - lane.column;
  }
  __device__ bool sees(int n, int h, int i) const { return 8 * n + h >= from[i] && 8 * n + h < end; }
};

// ---- sums of exponentials ------------------------------------------------------------------------------------------------

// A probe's sum is relative to 2^most. `most` is the largest logit so far, or less as long as terms are small enough.
struct WideProbeSums {
  static constexpr int kProbes = kPatternProbes / 4;  // probes of a lane: 2 n + h
  static constexpr float kRoom = 0x1p64f;             // limit of a term
  const WideJob& job;
  WideLane lane;
  float scale;
  float most[kProbes], sums[kProbes];

  __device__ WideProbeSums(const WideJob& of_job, float of_scale) : job(of_job), scale(of_scale) {
#pragma unroll
    for (int p = 0; p < kProbes; ++p) most[p] = -FLT_MAX, sums[p] = 0.0f;
  }
  // Returns the product of a lane's probe and its i-th key.
  __device__ static float product(const WideLogits& d, int probe, int i) { return d[probe / 2 * 4 + probe % 2 + 2 * i]; }
  // Makes all terms of a probe relative to the largest logit so far, including these two.
  __device__ __forceinline__ void raise(int probe, float logit, float other) {
    float& own = most[probe];
    const float now = fminf(fmaxf(own, fmaxf(logit, other)), FLT_MAX);
    sums[probe] *= exp2_fast(own - now);
    own = now;
  }
  // Adds both keys' terms of each probe. If a term is too large, adds nothing and returns false: the caller has to raise
  // `most` first. is_raised: `most` was raised, and any term that is still too large is infinite.
  __device__ __forceinline__ bool add_terms(const WideLogits& d, bool is_raised) {
    float terms[kProbes], largest[2] = {};
#pragma unroll
    for (int p = 0; p < kProbes; ++p) {
      terms[p] = exp2_fast(fmaf(product(d, p, 0), scale, -most[p])) + exp2_fast(fmaf(product(d, p, 1), scale, -most[p]));
      largest[p % 2] = fmaxf(largest[p % 2], terms[p]);
    }
    if (__any_sync(~0u, fmaxf(largest[0], largest[1]) > kRoom) && !is_raised) return false;
#pragma unroll
    for (int p = 0; p < kProbes; ++p) sums[p] += terms[p];
    return true;
  }
  // Adds terms where some probes do not see some keys.
  __device__ __forceinline__ void add_seen(const Sight& sight, const WideLogits& d) {
#pragma unroll
    for (int p = 0; p < kProbes; ++p) {
      float logits[kKeys];
#pragma unroll
      for (int i = 0; i < kKeys; ++i) logits[i] = sight.sees(p / 2, p % 2, i) ? product(d, p, i) * scale : -INFINITY;
      raise(p, logits[0], logits[1]);
#pragma unroll
      for (int i = 0; i < kKeys; ++i) sums[p] += exp2_fast(logits[i] - most[p]);
    }
  }
  __device__ __forceinline__ void operator()(int i, const WideLogits& d) {
    const int first = job.first_token(i, lane.warp);
    if (!job.all_see(first)) return add_seen(Sight(job, lane, first), d);
#pragma unroll 1
    for (bool is_raised = false; !add_terms(d, is_raised); is_raised = true) {
#pragma unroll
      for (int p = 0; p < kProbes; ++p) raise(p, product(d, p, 0) * scale, product(d, p, 1) * scale);
    }
  }
  // Adds up the sums of all lanes and warps, and leaves the block's sums in the work space.
  template <int kGroups>
  __device__ void leave(const PatternCall& call) const {
    __shared__ float_pair of_warps[kGroups][kGroupWarps][kPatternProbes];
#pragma unroll
    for (int p = 0; p < kProbes; ++p) {
      float_pair sum = {most[p], sums[p]};
      for (int mask = 4; mask < 32; mask *= 2)
        add_pair(sum, {__shfl_xor_sync(~0u, sum.most, mask), __shfl_xor_sync(~0u, sum.sum, mask)});
      if (lane.row == 0) of_warps[lane.head][lane.warp][p / 2 * 8 + lane.column + p % 2] = sum;
    }
    sync_threads(1, kGroups * kGroupThreads);
    const int head = static_cast<int>(threadIdx.x) / kPatternProbes, probe = static_cast<int>(threadIdx.x) % kPatternProbes;
    if (head >= job.n_heads) return;
    float_pair sum = of_warps[head][0][probe];
    for (int w = 1; w < kGroupWarps; ++w) add_pair(sum, of_warps[head][w][probe]);
    call.sums[(int64_t{job.first_head + head} * call.n_sums + blockIdx.x) * kPatternProbes + probe] = sum;
  }
};

// Clears the counts that choose the tokens of the block's heads, before the kernels that count.
__device__ inline void clear_bins(const PatternCall& call, const WideJob& job, int n_threads) {
  int* const bins = call.bins + int64_t{job.first_head} * (kChoices * kDigits * kBins);
  const int n = job.n_heads * (kChoices * kDigits * kBins), step = static_cast<int>(gridDim.x) * n_threads;
  for (int b = static_cast<int>(blockIdx.x) * n_threads + static_cast<int>(threadIdx.x); b < n; b += step) bins[b] = 0;
}

// ---- weights -------------------------------------------------------------------------------------------------------------

struct WideProbeWeights {
  const WideJob& job;
  const float* minus_lse;  // of the warpgroup's probes, in shared memory
  WideLane lane;
  float scale;
  float *columns, *run_bands;  // of the query head; null: they do not count
  BandSums bands;

  __device__ WideProbeWeights(const WidePatternCall& wide, const WideJob& of_job, const float* of_probes)
      : job(of_job), scale(wide.scale), columns(nullptr), run_bands(nullptr) {
    const PatternCall& call = wide.call;
    minus_lse = of_probes + lane.head * kPatternProbes;
    bands = no_bands();
    const int head = job.first_head + lane.head;
    if (lane.head >= job.n_heads || !has_kind(call, head, TANDEM_PATTERN_VERTICAL_SLASH)) return;
    columns = call.columns + head * call.patterns.sequences.max_keys;
    run_bands = call.bands + int64_t{head} * call.n_runs * kRunBands;
  }
  __device__ BandSums no_bands() const {
    const int x = job.first_probe % kPatternBand + lane.column - lane.row;
    return BandSums(x, x + 1);
  }
  template <bool kAllSee>
  __device__ __forceinline__ void add(const Sight& sight, const WideLogits& d, float (&sums)[kKeys]) {
#pragma unroll
    for (int n = kProbeGroups - 1; n >= 0; --n) {
      const float2 minus = *reinterpret_cast<const float2*>(minus_lse + 8 * n + lane.column);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float weights[kKeys];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          weights[i] = exp2_fast(fmaf(d[4 * n + 2 * i + h], scale, h == 0 ? minus.x : minus.y));
          if (!kAllSee && !sight.sees(n, h, i)) weights[i] = 0.0f;
          sums[i] += weights[i];
        }
        bands.add(n, h, weights[0], weights[1]);
      }
    }
  }
  // Sums over the four lanes that have the same keys.
  __device__ __forceinline__ void leave_columns(int first, const float (&sums)[kKeys]) const {
    const int i = static_cast<int>(threadIdx.x % 2);
    float sum = (i == 0 ? sums[0] : sums[1]) + __shfl_xor_sync(~0u, i == 0 ? sums[1] : sums[0], 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int token = first + lane.row + 8 * i;
    if (columns != nullptr && threadIdx.x % 4 < 2 && token < job.end) columns[token] = sum;
  }
  // Finishes a band, the run's at-th.
  __device__ __forceinline__ void leave_band(int run, int at) {
    float sum = bands.finish_band();
    for (int mask = 1; mask < 32; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (run_bands != nullptr && threadIdx.x % 32 == 0) run_bands[run * kRunBands + at] = sum;
  }
  __device__ __forceinline__ void operator()(int i, const WideLogits& d) {
    const int run = job.run(i, lane.warp), t = i % kRunTiles, first = run * kRunKeys + t * kProbeTile;
    float sums[kKeys] = {};
    if (job.all_see(first))
      add<true>(Sight(job, lane, first), d, sums);
    else
      add<false>(Sight(job, lane, first), d, sums);
    leave_columns(first, sums);
    leave_band(run, t);
    if (t + 1 < kRunTiles && first + kProbeTile < job.end) return;
      // Finishes the bands that the run's last keys have begun. Then the next run starts with clear bands.
#pragma unroll 1
    for (int at = t + 1; at <= t + kRunBands - kRunTiles; ++at) {
      bands.pass();
      leave_band(run, at);
    }
    bands = no_bands();
  }
};

// Computes the log-sum-exp of each of the block's probes from the sums of all blocks, times -1. 0 for a missing probe.
__device__ inline void join_wide_sums(const PatternCall& call, const WideJob& job, int most_heads, float* minus_lse) {
  const int row = static_cast<int>(threadIdx.x), head = row / kPatternProbes, probe = row % kPatternProbes;
  if (head >= most_heads) return;
  const int n_sums = min(static_cast<int>(gridDim.x), WideJob::n_wide_pieces(job.end));
  float lse = 0.0f;
  if (head < job.n_heads && probe < job.n_probes) {
    const float_pair* const from = call.sums + int64_t{job.first_head + head} * call.n_sums * kPatternProbes + probe;
    float_pair sum = {-FLT_MAX, 0.0f};
#pragma unroll 8
    for (int p = 0; p < n_sums; ++p) {
      const float2 of = __ldcg(reinterpret_cast<const float2*>(from + int64_t{p} * kPatternProbes));
      add_pair(sum, {of.x, of.y});
    }
    lse = sum.most + log2f(sum.sum);
  }
  minus_lse[row] = -lse;
}

// ---- kernels -------------------------------------------------------------------------------------------------------------

// kIsOfSums: the kernel makes sums, else weights.
template <int kGroups, bool kIsOfSums>
__global__ void __launch_bounds__((kGroups + 1) * kGroupThreads, 1)
    wide_probe_kernel(const __grid_constant__ WidePatternCall wide) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kThreads = kGroups * kGroupThreads;  // of the warps that multiply
  const PatternCall& call = wide.call;
  __shared__ uint64_t barriers[2 * kMostProbeStages];
  __shared__ __align__(8) float minus_lse[kGroups * kPatternProbes];
  const WideSpace space(call.keys.dim, kGroups, wide.n_stages, barriers);
  if (threadIdx.x == 0) {
    for (int s = 0; s < space.n_stages; ++s) {
      init_barrier(space.full(s), 1);
      init_barrier(space.empty(s), kThreads / 32);
    }
    publish_barriers();
  }
  begin_behind();
  WideJob job;
  if (!job.find(call, kGroups)) return;
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    give_registers<24>();
    if (threadIdx.x < kThreads + 32) bring_keys(call, &wide.map, job, space);
    return;
  }
  take_registers<kGroups == 4 ? 112 : 240>();
  if constexpr (kIsOfSums) {
    clear_bins(call, job, kThreads);
    if (job.n_tiles == 0) return;
    bring_wide_probes<kGroups>(call, job, space);
    WideProbeSums sums(job, wide.scale);
    walk_keys(job, space, sums);
    sums.leave<kGroups>(call);
  } else {
    if (job.n_tiles == 0) return;
    join_wide_sums(call, job, kGroups, minus_lse);
    bring_wide_probes<kGroups>(call, job, space);
    WideProbeWeights weights(wide, job, minus_lse);
    walk_keys(job, space, weights);
  }
#endif
}

}  // namespace tandem::cuda
