// SPDX-License-Identifier: MIT
// What head patterns choose: bits of the candidates with the largest scores (lib/tables/pattern_lists.h).
#pragma once

#include "cuda/kernels/pattern_job.cuh"
#include "cuda/kernels/radix_select.cuh"

namespace tandem::cuda {

// NaN is chosen last, as -infinity is.
__device__ inline uint32_t ordered_or_last(float score) { return ordered(is_nan(score) ? -INFINITY : score); }

struct TokenNumbers {
  const float* columns;

  __device__ uint32_t first(int i) const { return ordered_or_last(__ldcg(columns + i)); }
  __device__ uint32_t again(int i) const { return first(i); }
};

// A band's sum is that of up to two neighbouring runs. Run r has the bands from farthest - r * kRunTiles on downwards, one
// for each of its tiles and a few more.
struct BandNumbers {
  const float* bands;
  int farthest;  // of run 0
  int n_tiles;   // of all runs

  __device__ BandNumbers(const PatternCall& call, const DeviceSequence& sequence, int head)
      : bands(call.bands + int64_t{head} * call.n_runs * kRunBands) {
    const int end = static_cast<int>(sequence.end);
    farthest = (end - min(kPatternProbes, sequence.q_len)) / kPatternBand + kRunBands - kRunTiles - 1;
    n_tiles = (end + kProbeTile - 1) / kProbeTile;
  }
  __device__ uint32_t first(int band) const {
    if (band == 0) return ordered(INFINITY);
    const int from_farthest = farthest - band;  // of run 0's bands
    const int last_run = min(from_farthest, n_tiles - 1) / kRunTiles;
    float sum = 0.0f;
    for (int run = max(from_farthest - kRunBands + kRunTiles, 0) / kRunTiles; run <= last_run; ++run) {
      const int at = from_farthest - run * kRunTiles, n = min(kRunTiles, n_tiles - run * kRunTiles);
      if (at < n + kRunBands - kRunTiles) sum += __ldcg(bands + run * kRunBands + at);
    }
    return ordered_or_last(sum);
  }
  __device__ uint32_t again(int band) const { return first(band); }
};

// A row of bits, which begins with a word of its own.
struct ChosenBits {
  uint32_t* words;
  int n_words;

  // All of n candidates, or none, from word `from` on.
  __device__ void fill(int n, int from) const {
    for (int w = from + static_cast<int>(threadIdx.x); w < n_words; w += static_cast<int>(blockDim.x)) {
      const int bits = n - 32 * w;
      words[w] = bits >= 32 ? ~0u : bits > 0 ? (1u << bits) - 1 : 0u;
    }
  }
  // Those of n candidates that have the n_wanted largest scores.
  template <class Numbers, int kWarps>
  __device__ void choose(const Numbers& numbers, int n, int n_wanted, SelectRoom<kWarps>& room) const {
    if (n_wanted <= 0 || n_wanted >= n) return fill(n_wanted <= 0 ? 0 : n, 0);
    const LastKept last = find_last(numbers, n, n_wanted, room);
    const bool writes = threadIdx.x % 32 == 0;
    take_kept(numbers, n, last, room, [&](int first, unsigned kept, int) {
      if (writes) words[first / 32] = kept;
    });
    fill(0, (n + 31) / 32);
  }
};

// A block of threads chooses a query head's tokens, another one its bands.
static __global__ void __launch_bounds__(32 * kChooseWarps) choose_weights_kernel(const __grid_constant__ PatternCall call) {
  begin_behind();
  __shared__ SelectRoom<kChooseWarps> room;
  const DeviceSequence& sequence = sequence_of(call);
  const int head = static_cast<int>(blockIdx.x), end = static_cast<int>(sequence.end);
  if (sequence.q_len == 0 || !has_kind(call, head, TANDEM_PATTERN_VERTICAL_SLASH)) return;
  const DeviceHeadPattern& pattern = call.patterns.heads[head];
  uint32_t* const choices = choices_of(call, call.sequence, head);
  if (blockIdx.y == 0) {
    const TokenNumbers numbers = {call.columns + head * call.patterns.sequences.max_keys};
    return ChosenBits{choices, call.places.token_words}.choose(numbers, end, pattern.n_tokens, room);
  }
  const BandNumbers numbers(call, sequence, head);
  ChosenBits{choices + call.places.bands_at, call.places.band_words}.choose(numbers, (end - 1) / kPatternBand + 1,
                                                                            pattern.n_bands, room);
}

// A block of threads has a query head and one of its blocks of queries.
static __global__ void __launch_bounds__(32 * kSearchWarps) choose_blocks_kernel(const __grid_constant__ PatternCall call) {
  begin_behind();
  __shared__ SelectRoom<kSearchWarps> room;
  const DeviceSequence& sequence = sequence_of(call);
  const PatternQueries queries(sequence);
  const int head = static_cast<int>(blockIdx.x), block = static_cast<int>(blockIdx.y);
  if (block >= queries.n_blocks() || !has_kind(call, head, TANDEM_PATTERN_BLOCK_SPARSE)) return;
  const TokenNumbers numbers = {call.block_scores + (int64_t{head} * call.n_query_blocks + block) * call.n_key_blocks};
  uint32_t* const words =
      choices_of(call, call.sequence, head) + call.places.blocks_at + int64_t{block} * call.places.block_words;
  ChosenBits{words, call.places.block_words}.choose(numbers, queries.n_candidates(block), call.patterns.heads[head].n_blocks,
                                                    room);
}

}  // namespace tandem::cuda
