// SPDX-License-Identifier: MIT
// The key lists of blocks of queries (lib/tables/pattern_lists.h) from the bits of what their heads have chosen.
//
//   blocks of threads   [sequences][lists][blocks of queries]
//   each                finds out which units are named, a lane a unit and a warp a word of them; adds up how many are named
//                       before each word; writes a granule for each named unit, and the list
//
// Long lists are written in segments, of as many units as shared memory has bits for.
#pragma once

#include "cuda/kernels/decode_work.cuh"
#include "cuda/kernels/pattern_job.cuh"
#include "cuda/kernels/radix_select.cuh"

namespace tandem::cuda {

inline constexpr int kListThreads = 32 * kListWarps, kWordsOfThread = 4;
inline constexpr int kSegmentWords = kListThreads * kWordsOfThread, kSegmentUnits = 32 * kSegmentWords;
static_assert(kGranuleKeys == TANDEM_PATTERN_UNIT);

// A block of queries, and what its head says.
struct BlockPattern {
  int begin, end;  // of its queries: tokens
  int range_begin;
  int n_sinks;                                                                // units
  const uint32_t *tokens = nullptr, *bands = nullptr, *key_blocks = nullptr;  // what is chosen; null: the head has no such
  int band_words;

  // call.sequence does not count here.
  __device__ void find(const PatternCall& call, int sequence, int head, int block) {
    const PatternQueries queries(call.patterns.sequences.sequences[sequence]);
    const DeviceHeadPattern& pattern = call.patterns.heads[head];
    const uint32_t* const choices = choices_of(call, sequence, head);
    begin = range_begin = queries.block_begin(block);
    end = queries.block_end(block);
    band_words = call.places.band_words;
    n_sinks = 0;
    if ((pattern.kinds & TANDEM_PATTERN_A_SHAPE) != 0) {
      range_begin = static_cast<int>(min(int64_t{begin}, max(int64_t{begin} + 1 - pattern.window_len, int64_t{0})));
      n_sinks = static_cast<int>(min((pattern.sink_len + kGranuleKeys - 1) / kGranuleKeys, int64_t{INT32_MAX}));
    }
    if ((pattern.kinds & TANDEM_PATTERN_VERTICAL_SLASH) != 0) {
      tokens = choices;
      bands = choices + call.places.bands_at;
    }
    if ((pattern.kinds & TANDEM_PATTERN_BLOCK_SPARSE) != 0) {
      range_begin = min(range_begin, begin / kPatternKeyBlock * kPatternKeyBlock);
      key_blocks = choices + call.places.blocks_at + int64_t{block} * call.places.block_words;
    }
    if ((pattern.kinds & TANDEM_PATTERN_FULL) != 0) range_begin = 0;
  }

  // Whether some query is as far from a key of the unit before `begin` as a chosen band says.
  __device__ bool is_in_band(int token) const {
    const int first = max((begin - token - (kGranuleKeys - 1)) >> 4, 0), last = (end - 1 - token) >> 4;
    static_assert(kPatternBand == 16 && kQueryBlock + kGranuleKeys <= 30 * kPatternBand);  // one word has all of them
    const int word = first / 32;
    const uint32_t low = bands[word], high = word + 1 < band_words ? bands[word + 1] : 0u;
    return (__funnelshift_r(low, high, first % 32) & ((2u << (last - first)) - 1)) != 0;
  }
  // unit: begins before range_begin.
  __device__ bool names(int unit) const {
    const int token = unit * kGranuleKeys;
    bool is_named = unit < n_sinks;
    if (tokens != nullptr) {
      const uint32_t chosen = tokens[unit / 4] >> unit % 4 * kGranuleKeys & granule_bits(token, 0, begin);
      is_named |= chosen != 0 || is_in_band(token);
    }
    if (key_blocks != nullptr) {
      const int key_block = token / kPatternKeyBlock;
      is_named |= (key_blocks[key_block / 32] >> key_block % 32 & 1) != 0;
    }
    return is_named;
  }
};

struct UnitWords {
  uint32_t named[kSegmentWords];
  int before[kSegmentWords];  // how many units are named before those of the word
  int of_warps[kListWarps];
};

// A list's granules.
struct UnitLister {
  const PatternCall& call;
  const DeviceSequence& sequence;
  const BlockPattern& pattern;
  KeyGranule* granules;
  int n_granules;  // that there is room for

  __device__ void put(int at, int unit) const {
    if (at >= n_granules) return;
    const int token = unit * kGranuleKeys, page_len = call.keys.page_len;
    auto page_idx = static_cast<int>(static_cast<unsigned>(token) / static_cast<unsigned>(page_len));
    if (page_idx >= sequence.table_len) page_idx %= sequence.table_len;
    const int64_t page = call.patterns.sequences.page_tables[sequence.table_begin + page_idx];
    granules[at] = {token, granule_bits(token, 0, pattern.range_begin), page};
  }

  // Of units [first, first + n); n_before: granules before these. How many they are.
  __device__ int write(int first, int n, int n_before, UnitWords& words) const {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    const int n_words = (n + 31) / 32, own = static_cast<int>(threadIdx.x) * kWordsOfThread;
#pragma unroll 2
    for (int w = warp; w < n_words; w += kListWarps) {
      const int unit = 32 * w + lane;
      const unsigned named = __ballot_sync(~0u, unit < n && pattern.names(first + unit));
      if (lane == 0) words.named[w] = named;
    }
    __syncthreads();
    int n_named = 0, total = 0;
#pragma unroll
    for (int i = 0; i < kWordsOfThread; ++i) n_named += own + i < n_words ? __popc(words.named[own + i]) : 0;
    int before = n_before + sum_before(n_named, words.of_warps, &total);
#pragma unroll
    for (int i = 0; i < kWordsOfThread; ++i) {
      if (own + i >= n_words) break;
      words.before[own + i] = before;
      before += __popc(words.named[own + i]);
    }
    __syncthreads();
    for (int w = warp; w < n_words; w += kListWarps) {
      const unsigned named = words.named[w];
      if ((named >> lane & 1) != 0) put(words.before[w] + __popc(named & ((1u << lane) - 1)), first + 32 * w + lane);
    }
    __syncthreads();
    return total;
  }
};

// Where a list goes.
struct ListPlace {
  int64_t first_keys;  // of attend()'s sequences: the first that has queries of the block
  int64_t first_granule;
  int n_granules;  // that there is room for: none where the first has no number that a list can name

  __device__ ListPlace(const DevicePatterns& patterns, const DeviceSequence& sequence) {
    const int parts = (kQueryBlock + patterns.list_queries - 1) / patterns.list_queries;
    const int64_t block = sequence.first_list / parts + static_cast<int>(blockIdx.z + blockIdx.x);
    first_keys = int64_t{sequence.first_list} + int64_t{blockIdx.x} * parts;
    first_granule = (block * patterns.n_lists + blockIdx.y) * patterns.n_granules;
    n_granules = first_granule <= INT32_MAX - patterns.n_granules ? patterns.n_granules : 0;
  }
};

// One entry for each of attend()'s sequences that has queries of the block. One thread calls this.
__device__ inline void finish_list(const PatternCall& call, const BlockPattern& pattern, const ListPlace& place, int n) {
  const DevicePatterns& patterns = call.patterns;
  const int n_units = (pattern.range_begin + kGranuleKeys - 1) / kGranuleKeys, n_queries = pattern.end - pattern.begin;
  int64_t n_tokens = int64_t{n} * kGranuleKeys;
  if (n_units > 0 && pattern.names(n_units - 1)) n_tokens -= n_units * kGranuleKeys - pattern.range_begin;
  const DeviceKeys keys = {static_cast<int32_t>(place.first_granule), n > place.n_granules ? -1 : n, pattern.range_begin, 0};
  for (int p = 0; p * patterns.list_queries < n_queries; ++p)
    patterns.keys[(place.first_keys + p) * patterns.n_lists + blockIdx.y] = keys;
  auto* const totals = reinterpret_cast<Word*>(patterns.totals);
  atomicAdd(totals, static_cast<Word>(n_queries * n_tokens));
  atomicAdd(totals + 1, static_cast<Word>(n_tokens));
}

static __global__ void __launch_bounds__(kListThreads) pattern_lists_kernel(const __grid_constant__ PatternCall call) {
  begin_behind();
  __shared__ UnitWords words;
  const DevicePatterns& patterns = call.patterns;
  const DeviceSequence& sequence = patterns.sequences.sequences[blockIdx.z];
  const int block = static_cast<int>(blockIdx.x);
  if (block * kQueryBlock >= sequence.q_len) return;
  BlockPattern pattern;
  pattern.find(call, static_cast<int>(blockIdx.z), patterns.first_head + static_cast<int>(blockIdx.y) * patterns.head_step,
               block);
  const ListPlace place(patterns, sequence);
  const UnitLister lister = {call, sequence, pattern, patterns.granules + place.first_granule, place.n_granules};
  const int n_units = (pattern.range_begin + kGranuleKeys - 1) / kGranuleKeys;
  int n = 0;
  for (int first = 0; first < n_units; first += kSegmentUnits)
    n += lister.write(first, min(n_units - first, kSegmentUnits), n, words);
  if (threadIdx.x == 0) finish_list(call, pattern, place, n);
}

}  // namespace tandem::cuda
