// SPDX-License-Identifier: MIT
// Probe kernels (pattern_probe.cuh) for K and q in bf16 on compute capability 9.0. A block multiplies the probes of up to four
// query heads of a KV head at once, so that K is read once for them.
//
//   wide_probe_sums_kernel      each probe's largest logit and sum of exponentials, over the keys of a block
//   wide_probe_weights_kernel   each probe's log-sum-exp of these; weights, and their sums
//
//   warps 0 .. 3, 4 .. 7   two warpgroups, with kHeads query heads each. Warp w of both has the w-th of four runs of keys
//   warp 8                 has the copy engine bring 16 keys of each of the four runs: a stage. Warps 9 .. 11 are there so
//                          that the others may have their registers
//
// A warpgroup multiplies a stage's 64 keys with its probes. Keys are rows of the product here, and probes its columns:
//
//   lane 4 r + j    gets the products of keys r, r + 8 of its run's tile and probes 2 j + 8 n, 2 j + 8 n + 1, n from 0 to 7
//
// One warpgroup multiplies while the other adds up. What limits a pass over K is what memory brings, the product, and 2^x, all
// of which take nearly as long.
#pragma once

#include <cfloat>

#include "cuda/kernels/pattern_bands.cuh"
#include "cuda/kernels/pattern_job.cuh"
#include "cuda/kernels/query_rows.cuh"
#include "cuda/kernels/radix_select.cuh"
#include "cuda/kernels/search_keys.cuh"
#include "cuda/kernels/wgmma.cuh"

namespace tandem::cuda {

inline constexpr int kGroupWarps = 4;  // of a warpgroup
inline constexpr int kProbeThreads = kWideGroups * kGroupWarps * 32;
inline constexpr int kBoxBytes = kProbeTile * kSwizzledRow;  // 64 numbers of the keys of a tile
static_assert(kWideRuns == kGroupWarps && kWideProbeWarps * 32 == kProbeThreads + 32 * kGroupWarps);

extern __shared__ __align__(1024) std::byte probe_space[];

// What a block has to do: some query heads of a KV head, and pieces of 4 runs of its keys.
struct WideJob {
  const DeviceSequence* sequence;
  int kv_head, first_head, n_heads;  // query heads
  int end;                           // tokens
  int n_probes, first_probe;         // the token of the first
  int n_tiles;                       // of the first runs of all its pieces

  // False: there is nothing to do.
  template <int kHeads>
  __device__ bool find(const PatternCall& call) {
    constexpr int kAtOnce = kWideGroups * kHeads;
    sequence = &sequence_of(call);
    kv_head = static_cast<int>(blockIdx.y);
    const int of_group = static_cast<int>(blockIdx.z) * kAtOnce;
    first_head = kv_head * call.group_size + of_group;
    n_heads = min(kAtOnce, call.group_size - of_group);
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
  // Whether all probes are there and see all keys of a tile.
  __device__ bool all_see(int first) const { return n_probes == kPatternProbes && first + kProbeTile - 1 <= first_probe; }
};

// Shared memory: probes [warpgroups][steps of 64 numbers][heads][probes], then stages [steps][64 keys].
struct WideSpace {
  uint32_t rows, stages, barriers;
  int n_steps, n_stages, stage_bytes;

  __device__ WideSpace(int dim, int n_heads, int of_stages, const uint64_t* of_barriers) {
    n_steps = (dim + kWideStep - 1) / kWideStep;
    n_stages = of_stages;
    stage_bytes = n_steps * kGroupWarps * kBoxBytes;
    rows = (shared_address(probe_space) + 1023) / 1024 * 1024;
    stages = rows + kWideGroups * n_steps * n_heads * kPatternProbes * kSwizzledRow;
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

// A warp of its own brings all stages. Keys behind the end may be among them: the page has room for them. A tile without any
// key is not brought.
__device__ inline void bring_keys(const PatternCall& call, const CUtensorMap* map, const WideJob& job,
                                  const WideSpace& space) {
  constexpr int kPageTiles = kPatternKeyBlock / kProbeTile;  // that are in one page for certain
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

// Brings all probes; 0 in the place of those that are not there. Both warpgroups take part.
template <int kHeads>
__device__ inline void bring_wide_probes(const PatternCall& call, const WideJob& job, const WideSpace& space) {
  constexpr int kRows = kHeads * kPatternProbes, kPieces = kWideStep / kEight;
  const DeviceRows& q = call.patterns.q;
  const auto* const first = static_cast<const __nv_bfloat16*>(q.data) +
                            (int64_t{job.sequence->first_row} + job.sequence->q_len - job.n_probes) * q.token_stride;
  const int of_row = space.n_steps * kPieces, n = kWideGroups * kRows * of_row;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kProbeThreads) {
    const int row = i / of_row, at = i % of_row, head = row / kPatternProbes, probe = row % kPatternProbes;
    uint4 x = {};
    if (head < job.n_heads && probe < job.n_probes && at * kEight < call.keys.dim)
      x = __ldg(
          reinterpret_cast<const uint4*>(first + probe * q.token_stride + (job.first_head + head) * q.head_stride + at * kEight));
    const int block = row / kRows * space.n_steps + at / kPieces;
    store_words(space.rows + block * (kRows * kSwizzledRow) + swizzled(row % kRows, at % kPieces), x.x, x.y, x.z, x.w);
  }
  fence_products();
  sync_threads(1, kProbeThreads);
}

// Calls take(i, d) for each tile of the warp's runs: d has the products of its keys with the warpgroup's probes.
template <int kWidth, class Take>
__device__ __forceinline__ void walk_keys(const WideJob& job, const WideSpace& space, Take& take) {
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x / (32 * kGroupWarps)), 0);
  const int warp = static_cast<int>(threadIdx.x / 32) % kGroupWarps;
  const uint32_t rows = space.rows + group * (space.n_steps * kWidth * kSwizzledRow);
  StageTurn turn;
  const auto multiply = [&](float(&d)[kWidth / 2]) {
    const uint32_t stage = space.stage(turn.stage);
    wait_for_phase(space.full(turn.stage), turn.parity);
    begin_products();
#pragma unroll 1
    for (int step = 0; step < space.n_steps; ++step)
#pragma unroll
      for (int k = 0; k < kWideStep / 16; ++k)
        Wgmma<Bfloat, kWidth>::keys(d, describe_matrix(stage + step * (kGroupWarps * kBoxBytes) + 32 * k, 16),
                                    describe_matrix(rows + step * (kWidth * kSwizzledRow) + 32 * k, 16), step > 0 || k > 0);
    commit_products();
  };
  const auto finish = [&](float(&d)[kWidth / 2]) {
    wait_for_products<0>();
    pin(d);
    if (threadIdx.x % 32 == 0) arrive(space.empty(turn.stage));
    turn.advance(space.n_stages);
  };
  const auto add = [&](int i, const float(&d)[kWidth / 2]) {
    if (job.first_token(i, warp) < job.end) take(i, d);
  };
  float even[kWidth / 2], odd[kWidth / 2];
  multiply(even);
  finish(even);
  int i = 0;
#pragma unroll 1
  for (; i + 2 < job.n_tiles; i += 2) {
    multiply(odd);
    add(i, even);
    finish(odd);
    multiply(even);
    add(i + 1, odd);
    finish(even);
  }
#pragma unroll 1
  while (true) {
    add(i, even);
    if (++i >= job.n_tiles) break;
    multiply(even);
    finish(even);
  }
}

// The lane's keys and probes.
struct WideLane {
  int warp, row, column, first_head;  // w; r; 2 j; of the warpgroup's heads, counted from the block's first

  __device__ explicit WideLane(int n_heads) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    warp = static_cast<int>(threadIdx.x / 32) % kGroupWarps;
    row = lane / 4, column = lane % 4 * 2;
    first_head = static_cast<int>(threadIdx.x) / (32 * kGroupWarps) * n_heads;
  }
};

// Which of the lane's probes see which of its keys, in a tile that begins with token `first`.
struct Sight {
  int from[kKeys], end;  // of 8 n + h

  __device__ Sight(const WideJob& job, const WideLane& lane, int first) : end(job.n_probes - lane.column) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) from[i] = first + lane.row + 8 * i - job.first_probe - lane.column;
  }
  __device__ bool sees(int n, int h, int i) const { return 8 * n + h >= from[i] && 8 * n + h < end; }
};

// ---- sums of exponentials ------------------------------------------------------------------------------------------------

// A probe's sum is relative to 2^most, where `most` is at least its largest logit but kRoom.
template <int kHeads>
struct WideProbeSums {
  static constexpr int kWidth = kHeads * kPatternProbes;
  static constexpr float kRoom = 64.0f;  // doublings that a term may be above the largest one so far
  const WideJob& job;
  WideLane lane;
  float scale;
  float most[kWidth / 4], sums[kWidth / 4];  // of the lane's probes: 2 n + h, head by head

  __device__ WideProbeSums(const WideJob& of_job, float of_scale) : job(of_job), lane(kHeads), scale(of_scale) {
#pragma unroll
    for (int j = 0; j < kWidth / 4; ++j) most[j] = -FLT_MAX, sums[j] = 0.0f;
  }
  // Makes all terms of a probe relative to the largest logit so far, these two among them.
  __device__ __forceinline__ void raise(int probe, float logit, float other) {
    float& own = most[probe];
    const float now = fminf(fmaxf(own, fmaxf(logit, other)), FLT_MAX);
    sums[probe] *= exp2_fast(own - now);
    own = now;
  }
  __device__ __forceinline__ void add(const float (&d)[kWidth / 2]) {
    constexpr int kOfHead = 4 * kProbeGroups;  // products
    const auto term = [&](int j) { return fmaf(d[j], scale, -most[j / 4 * 2 + j % 2]); };
#pragma unroll
    for (int a = 0; a < kHeads; ++a) {
      float over[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
      for (int j = a * kOfHead; j < (a + 1) * kOfHead; ++j) over[j % 4] = fmaxf(over[j % 4], term(j));
      if (__any_sync(~0u, fmaxf(fmaxf(over[0], over[1]), fmaxf(over[2], over[3])) > kRoom)) {
#pragma unroll
        for (int j = a * kOfHead; j < (a + 1) * kOfHead; ++j)
          if (j / 2 % 2 == 0) raise(j / 4 * 2 + j % 2, d[j] * scale, d[j + 2] * scale);
      }
#pragma unroll
      for (int j = a * kOfHead; j < (a + 1) * kOfHead; ++j) sums[j / 4 * 2 + j % 2] += exp2_fast(term(j));
    }
  }
  // Where some probes do not see some keys.
  __device__ __forceinline__ void add_seen(const Sight& sight, const float (&d)[kWidth / 2]) {
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float logits[kKeys];
#pragma unroll
        for (int i = 0; i < kKeys; ++i)
          logits[i] = sight.sees(n % kProbeGroups, h, i) ? d[4 * n + 2 * i + h] * scale : -INFINITY;
        raise(2 * n + h, logits[0], logits[1]);
#pragma unroll
        for (int i = 0; i < kKeys; ++i) sums[2 * n + h] += exp2_fast(logits[i] - most[2 * n + h]);
      }
  }
  __device__ __forceinline__ void operator()(int i, const float (&d)[kWidth / 2]) {
    const int first = job.first_token(i, lane.warp);
    if (job.all_see(first))
      add(d);
    else
      add_seen(Sight(job, lane, first), d);
  }
  // Adds up the sums of all lanes and warps, and leaves the block's in the work space.
  __device__ void leave(const PatternCall& call) const {
    __shared__ float_pair of_warps[kWideGroups][kGroupWarps][kWidth];
    const int group = lane.first_head / kHeads;
#pragma unroll
    for (int j = 0; j < kWidth / 4; ++j) {
      float_pair sum = {most[j], sums[j]};
      for (int mask = 4; mask < 32; mask *= 2)
        add_pair(sum, {__shfl_xor_sync(~0u, sum.most, mask), __shfl_xor_sync(~0u, sum.sum, mask)});
      if (lane.row == 0) of_warps[group][lane.warp][j / 2 * 8 + lane.column + j % 2] = sum;
    }
    sync_threads(1, kProbeThreads);
    const int row = static_cast<int>(threadIdx.x), head = row / kPatternProbes;
    if (head >= job.n_heads) return;
    float_pair sum = of_warps[row / kWidth][0][row % kWidth];
    for (int w = 1; w < kGroupWarps; ++w) add_pair(sum, of_warps[row / kWidth][w][row % kWidth]);
    call.sums[(int64_t{job.first_head + head} * call.n_sums + blockIdx.x) * kPatternProbes + row % kPatternProbes] = sum;
  }
};

// The counts that choose the tokens of the block's heads are 0 before the kernels that count.
__device__ inline void clear_bins(const PatternCall& call, const WideJob& job) {
  int* const bins = call.bins + int64_t{job.first_head} * (kChoices * kDigits * kBins);
  const int n = job.n_heads * (kChoices * kDigits * kBins), step = static_cast<int>(gridDim.x) * kProbeThreads;
  for (int b = static_cast<int>(blockIdx.x) * kProbeThreads + static_cast<int>(threadIdx.x); b < n; b += step) bins[b] = 0;
}

// ---- weights -------------------------------------------------------------------------------------------------------------

template <int kHeads>
struct WideProbeWeights {
  static constexpr int kWidth = kHeads * kPatternProbes;
  const PatternCall& call;
  const WideJob& job;
  const float* minus_lse;  // of the warpgroup's probes, in shared memory
  WideLane lane;
  float scale;
  float *columns, *run_bands;  // of the query head whose sums the lane writes, or null
  BandSums bands[kHeads];

  __device__ WideProbeWeights(const PatternCall& of_call, const WideJob& of_job, const float* of_probes)
      : call(of_call),
        job(of_job),
        lane(kHeads),
        scale(of_call.sm_scale * kLog2E) {
#pragma unroll
    for (int a = 0; a < kHeads; ++a) bands[a] = make_bands(of_job, lane);
    minus_lse = of_probes + lane.first_head * kPatternProbes;
    columns = run_bands = nullptr;
    const int own = static_cast<int>(threadIdx.x % 32);
    if (const int head = lane.first_head + (kHeads == 1 ? 0 : own % 4 / 2); has(head))
      columns = call.columns + (job.first_head + head) * call.patterns.sequences.max_keys;
    if (const int head = lane.first_head + (kHeads == 1 ? 0 : own / 16); has(head))
      run_bands = call.bands + int64_t{job.first_head + head} * call.n_runs * kRunBands;
  }
  __device__ static BandSums make_bands(const WideJob& job, const WideLane& lane) {
    const int x = job.first_probe % kPatternBand + lane.column - lane.row;
    return BandSums(x, x + 1);
  }
  __device__ bool has(int head) const {
    return head < job.n_heads && has_kind(call, job.first_head + head, TANDEM_PATTERN_VERTICAL_SLASH);
  }
  template <bool kAllSee>
  __device__ __forceinline__ void add(const Sight& sight, const float (&d)[kWidth / 2], float (&sums)[kHeads][kKeys]) {
#pragma unroll
    for (int a = 0; a < kHeads; ++a)
#pragma unroll
      for (int n = kProbeGroups - 1; n >= 0; --n) {
        const float2 minus = *reinterpret_cast<const float2*>(minus_lse + a * kPatternProbes + 8 * n + lane.column);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float weights[kKeys];
#pragma unroll
          for (int i = 0; i < kKeys; ++i) {
            const float logit = d[4 * (a * kProbeGroups + n) + 2 * i + h];
            weights[i] = exp2_fast(fmaf(logit, scale, h == 0 ? minus.x : minus.y));
            if (!kAllSee && !sight.sees(n, h, i)) weights[i] = 0.0f;
            sums[a][i] += weights[i];
          }
          bands[a].add(n, h, weights[0], weights[1]);
        }
      }
  }
  // Over the four lanes that have the same keys. With two heads lane j gets key j % 2 of head j / 2.
  __device__ __forceinline__ void leave_columns(int first, const float (&sums)[kHeads][kKeys]) const {
    const int j = static_cast<int>(threadIdx.x % 4);
    float of_keys[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const float mine = kHeads == 1 || j < 2 ? sums[0][i] : sums[kHeads - 1][i];
      const float other = kHeads == 1 || j >= 2 ? sums[0][i] : sums[kHeads - 1][i];
      of_keys[i] = mine + __shfl_xor_sync(~0u, other, 2);
    }
    const float sum = (j % 2 == 0 ? of_keys[0] : of_keys[1]) + __shfl_xor_sync(~0u, j % 2 == 0 ? of_keys[1] : of_keys[0], 1);
    const int token = first + lane.row + 8 * (j % 2);
    if (columns != nullptr && token < job.end && (kHeads > 1 || j < 2)) columns[token] = sum;
  }
  // Finishes a band of each head: the run's at-th. With two heads the upper half of the lanes adds up those of the second.
  __device__ __forceinline__ void leave_band(int run, int at) {
    const int own = static_cast<int>(threadIdx.x % 32);
    float sum = bands[0].finish_band();
    if constexpr (kHeads > 1) {
      const float second = bands[1].finish_band();
      sum = (own < 16 ? sum : second) + __shfl_xor_sync(~0u, own < 16 ? second : sum, 16);
    } else {
      sum += __shfl_xor_sync(~0u, sum, 16);
    }
    for (int mask = 1; mask < 16; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (run_bands != nullptr && own % (kHeads > 1 ? 16 : 32) == 0) run_bands[run * kRunBands + at] = sum;
  }
  __device__ __forceinline__ void operator()(int i, const float (&d)[kWidth / 2]) {
    const int run = job.run(i, lane.warp), t = i % kRunTiles, first = run * kRunKeys + t * kProbeTile;
    float sums[kHeads][kKeys] = {};
    if (job.all_see(first))
      add<true>(Sight(job, lane, first), d, sums);
    else
      add<false>(Sight(job, lane, first), d, sums);
    leave_columns(first, sums);
    leave_band(run, t);
    if (t + 1 < kRunTiles && first + kProbeTile < job.end) return;
    // The bands that the run's last keys have begun; and the next run begins anew.
#pragma unroll 1
    for (int at = t + 1; at <= t + kRunBands - kRunTiles; ++at) {
#pragma unroll
      for (int a = 0; a < kHeads; ++a) bands[a].pass();
      leave_band(run, at);
    }
#pragma unroll
    for (int a = 0; a < kHeads; ++a) bands[a] = make_bands(job, lane);
  }
};

// The log-sum-exp of each of the block's probes, of the sums that all blocks have left, times -1. 0: the probe is not there.
__device__ inline void join_wide_sums(const PatternCall& call, const WideJob& job, float* minus_lse) {
  const int row = static_cast<int>(threadIdx.x), head = row / kPatternProbes, probe = row % kPatternProbes;
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

// kIsOfSums: else it is of weights.
template <int kHeads, bool kIsOfSums>
__global__ void __launch_bounds__(kWideProbeWarps * 32, 1) wide_probe_kernel(const __grid_constant__ WidePatternCall wide) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const PatternCall& call = wide.call;
  __shared__ uint64_t barriers[2 * kMostProbeStages];
  __shared__ __align__(8) float minus_lse[kProbeThreads];
  const WideSpace space(call.keys.dim, kHeads, wide.n_stages, barriers);
  if (threadIdx.x == 0) {
    for (int s = 0; s < space.n_stages; ++s) {
      init_barrier(space.full(s), 1);
      init_barrier(space.empty(s), kProbeThreads / 32);
    }
    publish_barriers();
  }
  begin_behind();
  WideJob job;
  if (!job.find<kHeads>(call)) return;
  __syncthreads();
  if (threadIdx.x >= kProbeThreads) {
    give_registers<40>();
    if (threadIdx.x < kProbeThreads + 32) bring_keys(call, &wide.map, job, space);
    return;
  }
  take_registers<232>();
  if constexpr (kIsOfSums) {
    clear_bins(call, job);
    if (job.n_tiles == 0) return;
    bring_wide_probes<kHeads>(call, job, space);
    WideProbeSums<kHeads> sums(job, call.sm_scale * kLog2E);
    walk_keys<kHeads * kPatternProbes>(job, space, sums);
    sums.leave(call);
  } else {
    if (job.n_tiles == 0) return;
    join_wide_sums(call, job, minus_lse);
    bring_wide_probes<kHeads>(call, job, space);
    WideProbeWeights<kHeads> weights(call, job, minus_lse);
    walk_keys<kHeads * kPatternProbes>(job, space, weights);
  }
#endif
}

}  // namespace tandem::cuda
