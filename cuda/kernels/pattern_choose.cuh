// SPDX-License-Identifier: MIT
// The choices of head patterns: bits of the candidates with the largest scores (lib/tables/pattern_lists.h).
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

// Sums of bands. A band's sum is the sum of up to two neighbouring runs. Run r has the bands from farthest - r * kRunTiles
// downwards, one for each of its tiles and a few more.
struct BandNumbers {
  const float* bands;
  int farthest;  // band of run 0
  int n_tiles;   // tiles of all runs

  __device__ BandNumbers(const PatternCall& call, const DeviceSequence& sequence, int head)
      : bands(call.bands + int64_t{head} * call.n_runs * kRunBands) {
    const int end = static_cast<int>(sequence.end);
    farthest = (end - min(kPatternProbes, sequence.q_len)) / kPatternBand + kRunBands - kRunTiles - 1;
    n_tiles = (end + kProbeTile - 1) / kProbeTile;
  }
  __device__ uint32_t first(int band) const {
    if (band == 0) return ordered(INFINITY);
    const int from_farthest = farthest - band;  // place among run 0's bands
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

  // Sets the bits of all n candidates, or of none (n = 0), from word `from` on.
  __device__ void fill(int n, int from) const {
    for (int w = from + static_cast<int>(threadIdx.x); w < n_words; w += static_cast<int>(blockDim.x)) {
      const int bits = n - 32 * w;
      words[w] = bits >= 32 ? ~0u : bits > 0 ? (1u << bits) - 1 : 0u;
    }
  }
  // Sets the bits of the n_wanted candidates with the largest scores, of n.
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

// ---- tokens and bands ----------------------------------------------------------------------------------------------------
//
// A head has many candidates, and there are few heads, so several blocks share a head's candidates. A launch counts each
// digit: its blocks add their counts to those of the head. All blocks of the next launch find the digit from these counts.
// The last launch writes the choices. In each launch the blocks for tokens come first, then those for bands.

// A block's part of the tokens, or of the bands, of a query head.
template <class Numbers>
struct ChoicePart {
  static constexpr int kAtOnce = 4;  // numbers that a thread loads at once
  Numbers numbers;                   // scores of the head's candidates
  ChosenBits bits;
  int* bins;        // [kDigits][kBins], of the head
  int end, begin;   // candidates of the head; the part's first candidate
  int n, n_wanted;  // candidates of the part; choices of the head

  __device__ uint32_t first(int i) const { return numbers.first(begin + i); }
  __device__ uint32_t again(int i) const { return numbers.again(begin + i); }
  // True if some but not all candidates of the head are chosen.
  __device__ bool chooses() const { return n_wanted > 0 && n_wanted < end; }

  // Returns what the launches before the one that counts digit `pass` have found.
  __device__ Known find(int pass, SelectRoom<kSearchWarps>& room) const {
    Known known = {{0, n_wanted}, 0};
#pragma unroll 1
    for (int p = 0; p < pass; ++p) {
      for (int b = static_cast<int>(threadIdx.x); b < kBins; b += 32 * kSearchWarps)
        room.bins[b] = __ldcg(bins + p * kBins + b);
      __syncthreads();
      known.take(p, room);
    }
    return known;
  }
  // Returns how many candidates before the part equal the last kept one. 0 where all that equal it are kept.
  __device__ int n_equal_before(const LastKept& last, SelectRoom<kSearchWarps>& room) const {
    const Digit digit(kDigits - 1);
    if (__ldcg(bins + (kDigits - 1) * kBins + static_cast<int>(last.ordered >> digit.shift & digit.mask)) == last.n_equal)
      return 0;
    int n_equal = 0, total = 0;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < begin; i += 32 * kSearchWarps)
      n_equal += numbers.again(i) == last.ordered ? 1 : 0;
    sum_before(n_equal, room.of_warps[0], &total);
    __syncthreads();
    return total;
  }
  __device__ void count(int pass, SelectRoom<kSearchWarps>& room) const {
    if (n == 0 || !chooses()) return;
    find(pass, room).template count<kAtOnce>(*this, n, pass, room);
    for (int b = static_cast<int>(threadIdx.x); b < kBins; b += 32 * kSearchWarps)
      if (room.bins[b] != 0) atomicAdd(bins + pass * kBins + b, room.bins[b]);
  }
  // Writes the part's choices. The first block also writes the words behind the candidates.
  __device__ void choose(SelectRoom<kSearchWarps>& room) const {
    if (n == 0) return;
    if (begin == 0) bits.fill(chooses() || n_wanted <= 0 ? 0 : end, chooses() ? (end + 31) / 32 : 0);
    if (!chooses()) return;
    LastKept last = find(kDigits, room).last;
    last.n_equal = max(last.n_equal - n_equal_before(last, room), 0);
    const bool writes = threadIdx.x % 32 == 0;
    take_kept<kAtOnce>(*this, n, last, room, [&](int first, unsigned kept, int) {
      if (writes) bits.words[(begin + first) / 32] = kept;
    });
  }
};

// Calls use(part) for the block's part.
template <class Use>
__device__ __forceinline__ void with_part(const PatternCall& call, Use use) {
  const DeviceSequence& sequence = sequence_of(call);
  const int head = static_cast<int>(blockIdx.x), end = static_cast<int>(sequence.end);
  if (sequence.q_len == 0 || !has_kind(call, head, TANDEM_PATTERN_VERTICAL_SLASH)) return;
  const DeviceHeadPattern& pattern = call.patterns.heads[head];
  uint32_t* const words = choices_of(call, call.sequence, head);
  int* const bins = call.bins + head * (kChoices * kDigits * kBins);
  const int part = static_cast<int>(blockIdx.y) - call.n_token_parts;
  if (part < 0) {
    const int begin = static_cast<int>(blockIdx.y) * kTokenPart, n = min(end - begin, kTokenPart);
    const TokenNumbers numbers = {call.columns + head * call.patterns.sequences.max_keys};
    use(ChoicePart<TokenNumbers>{numbers, {words, call.places.token_words}, bins, end, begin, max(n, 0), pattern.n_tokens});
  } else {
    const int n_bands = (end - 1) / kPatternBand + 1, begin = part * kBandPart, n = min(n_bands - begin, kBandPart);
    const ChosenBits bits = {words + call.places.bands_at, call.places.band_words};
    use(ChoicePart<BandNumbers>{BandNumbers(call, sequence, head), bits, bins + kDigits * kBins, n_bands, begin, max(n, 0),
                                pattern.n_bands});
  }
}

template <int kPass>
__global__ void __launch_bounds__(32 * kSearchWarps) count_digit_kernel(const __grid_constant__ PatternCall call) {
  begin_behind();
  __shared__ SelectRoom<kSearchWarps> room;
  with_part(call, [&](const auto& part) { part.count(kPass, room); });
}

static __global__ void __launch_bounds__(32 * kSearchWarps) choose_kernel(const __grid_constant__ PatternCall call) {
  begin_behind();
  __shared__ SelectRoom<kSearchWarps> room;
  with_part(call, [&](const auto& part) { part.choose(room); });
}

// ---- key blocks ----------------------------------------------------------------------------------------------------------

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
