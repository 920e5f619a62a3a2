// SPDX-License-Identifier: MIT
// Makes the key lists of blocks of queries (lib/tables/pattern_lists.h) from the bits of their heads' choices.
//
//   blocks of threads   [sequences][lists][blocks of queries]
//   each thread         finds all named units of 32 at once; notes them behind those of the threads before it; writes a
//                       granule for every 256th of all named units
//
// Long lists are written in segments of 32 units for each thread.
#pragma once

#include "cuda/kernels/decode_work.cuh"
#include "cuda/kernels/pattern_job.cuh"
#include "cuda/kernels/radix_select.cuh"

namespace tandem::cuda {

inline constexpr int kListThreads = 32 * kListWarps, kSegmentUnits = 32 * kListThreads;
static_assert(kGranuleKeys == TANDEM_PATTERN_UNIT);

// ---- bits ----------------------------------------------------------------------------------------------------------------

// Returns a word with bits [0, n) set.
__device__ inline uint32_t low_bits(int n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

// Returns a word in which bit i is set if byte i of x has any bit.
__device__ inline uint32_t bytes_with_bits(uint32_t x) {
  x |= x >> 4, x |= x >> 2, x |= x >> 1;
  return (x & 0x01010101u) * 0x10204080u >> 28;
}

// Returns a word in which bit i is set if x has any of bits [i, i + n), n from 1 to 32.
__device__ inline uint32_t any_of_next(uint32_t x, int n) {
  int have = 1;
  for (; 2 * have <= n; have *= 2) x |= x >> have;
  return x | x >> (n - have);
}

// Moves bit i to bit 2 i, for 16 bits.
__device__ inline uint32_t spread_bits(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ffu;
  x = (x | x << 4) & 0x0f0f0f0fu;
  x = (x | x << 2) & 0x33333333u;
  return (x | x << 1) & 0x55555555u;
}

// ---- a list --------------------------------------------------------------------------------------------------------------

// A block of queries, and the choices of its head.
struct BlockPattern {
  int begin, end;  // tokens of its queries
  int range_begin;
  int n_sinks;                                                                // units
  const uint32_t *tokens = nullptr, *bands = nullptr, *key_blocks = nullptr;  // choices; null: the head has none of the kind
  int band_words;

  // Units that begin before range_begin.
  __device__ int n_units() const { return (range_begin + kGranuleKeys - 1) / kGranuleKeys; }

  // Sets all members. Does not use call.sequence.
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

  // Returns bands [first, first + 32). Bands below 0 and behind the last word are not chosen.
  __device__ uint32_t bands_from(int first) const {
    const int word = first >> 5;
    const uint32_t low = word >= 0 && word < band_words ? bands[word] : 0u;
    const uint32_t high = word + 1 >= 0 && word + 1 < band_words ? bands[word + 1] : 0u;
    return __funnelshift_r(low, high, first & 31);
  }
  // Returns a word in which bit i is set if unit 32 word + i has a key before `begin` whose distance from some query is in
  // a chosen band. The distances of a unit with an even number 2 v are in bands [first[0] - v, last[0] - v], those of the
  // next unit in [first[1] - v, last[1] - v].
  __device__ uint32_t in_bands(int word) const {
    static_assert(kPatternBand == 16 && kGranuleKeys == 8 && kQueryBlock + 2 * kGranuleKeys <= 15 * kPatternBand);
    const int first[2] = {(begin - 7) >> 4, (begin - 15) >> 4}, last[2] = {(end - 1) >> 4, (end - 9) >> 4};
    const int from = first[1] - 16 * word - 15;  // first[1] is never larger than first[0]
    const uint32_t chosen = bands_from(from);
    uint32_t named = 0;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const uint32_t any = any_of_next(chosen, last[odd] - first[odd] + 1) >> (first[odd] - first[1]);
      named |= spread_bits(__brev(any & 0xffffu) >> 16) << odd;  // units with larger numbers are nearer
    }
    return named;
  }
  // Returns a word in which bit i is set if unit 32 word + i begins before range_begin and is named.
  __device__ uint32_t names(int word) const {
    const int n_units = this->n_units();
    uint32_t named = low_bits(n_sinks - 32 * word);
    if (tokens != nullptr) {
      named |= in_bands(word);
#pragma unroll
      for (int i = 0; i < kGranuleKeys; ++i) {
        const int at = kGranuleKeys * word + i, n_before = begin - 32 * at;
        if (n_before > 0) named |= bytes_with_bits(tokens[at] & low_bits(n_before)) << 4 * i;
      }
    }
    if (key_blocks != nullptr) {
      const uint32_t four = key_blocks[word / 8] >> word % 8 * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) named |= (four >> i & 1) * (0xffu << 8 * i);
    }
    return named & low_bits(n_units - 32 * word);
  }
};

struct NamedOfSegment {
  uint16_t units[kSegmentUnits];  // counted from the segment's first unit
  int of_warps[kListWarps];
  int last_is_named;  // the last of all units is named
};

// Writes a list's granules.
struct UnitLister {
  const PatternCall& call;
  const DeviceSequence& sequence;
  const BlockPattern& pattern;
  KeyGranule* granules;
  int n_granules;  // that the list has room for

  __device__ void put(int at, int unit) const {
    if (at >= n_granules) return;
    const int token = unit * kGranuleKeys, page_len = call.keys.page_len;
    auto page_idx = static_cast<int>(static_cast<unsigned>(token) / static_cast<unsigned>(page_len));
    if (page_idx >= sequence.table_len) page_idx %= sequence.table_len;
    const int64_t page = call.patterns.sequences.page_tables[sequence.table_begin + page_idx];
    granules[at] = {token, granule_bits(token, 0, pattern.range_begin), page};
  }

  // Writes the granules of a segment. n_before: granules before these. Returns their number.
  __device__ int write(int first, int n_before, NamedOfSegment& segment) const {
    const int word = first / 32 + static_cast<int>(threadIdx.x), last = (pattern.range_begin - 1) / kGranuleKeys;
    const bool has_units = word <= last / 32;
    const uint32_t named = has_units ? pattern.names(word) : 0u;
    if (word == last / 32) segment.last_is_named = static_cast<int>(named >> last % 32 & 1);
    int total = 0, at = sum_before(__popc(named), segment.of_warps, &total);
    for (uint32_t rest = named; rest != 0; rest &= rest - 1)
      segment.units[at++] = static_cast<uint16_t>(32 * threadIdx.x + __ffs(static_cast<int>(rest)) - 1);
    __syncthreads();
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < total; i += kListThreads) put(n_before + i, first + segment.units[i]);
    __syncthreads();
    return total;
  }
};

// The place of a list: its entries and its granules.
struct ListPlace {
  int64_t first_keys;  // the first of attend()'s sequences with queries of the block
  int64_t first_granule;
  int n_granules;  // room; 0 where a key list cannot express first_granule

  __device__ ListPlace(const DevicePatterns& patterns, const DeviceSequence& sequence) {
    const int parts = (kQueryBlock + patterns.list_queries - 1) / patterns.list_queries;
    const int64_t block = sequence.first_list / parts + static_cast<int>(blockIdx.z + blockIdx.x);
    first_keys = int64_t{sequence.first_list} + int64_t{blockIdx.x} * parts;
    first_granule = (block * patterns.n_lists + blockIdx.y) * patterns.n_granules;
    n_granules = first_granule <= INT32_MAX - patterns.n_granules ? patterns.n_granules : 0;
  }
};

// Writes the entry of each of attend()'s sequences with queries of the block. One thread calls this. last_is_named: the
// last unit is named, which may have fewer tokens before the range.
__device__ inline void finish_list(const PatternCall& call, const BlockPattern& pattern, const ListPlace& place, int n,
                                   bool last_is_named) {
  const DevicePatterns& patterns = call.patterns;
  const int n_units = pattern.n_units(), n_queries = pattern.end - pattern.begin;
  int64_t n_tokens = int64_t{n} * kGranuleKeys;
  if (last_is_named) n_tokens -= n_units * kGranuleKeys - pattern.range_begin;
  const DeviceKeys keys = {static_cast<int32_t>(place.first_granule), n > place.n_granules ? -1 : n, pattern.range_begin, 0};
  for (int p = 0; p * patterns.list_queries < n_queries; ++p)
    patterns.keys[(place.first_keys + p) * patterns.n_lists + blockIdx.y] = keys;
  auto* const totals = reinterpret_cast<Word*>(patterns.totals);
  atomicAdd(totals, static_cast<Word>(n_queries * n_tokens));
  atomicAdd(totals + 1, static_cast<Word>(n_tokens));
}

static __global__ void __launch_bounds__(kListThreads) pattern_lists_kernel(const __grid_constant__ PatternCall call) {
  begin_behind();
  __shared__ NamedOfSegment segment;
  const DevicePatterns& patterns = call.patterns;
  const DeviceSequence& sequence = patterns.sequences.sequences[blockIdx.z];
  const int block = static_cast<int>(blockIdx.x);
  if (block * kQueryBlock >= sequence.q_len) return;
  BlockPattern pattern;
  pattern.find(call, static_cast<int>(blockIdx.z), patterns.first_head + static_cast<int>(blockIdx.y) * patterns.head_step,
               block);
  const ListPlace place(patterns, sequence);
  const UnitLister lister = {call, sequence, pattern, patterns.granules + place.first_granule, place.n_granules};
  const int n_units = pattern.n_units();
  int n = 0;
  for (int first = 0; first < n_units; first += kSegmentUnits) n += lister.write(first, n, segment);
  if (threadIdx.x == 0) finish_list(call, pattern, place, n, n_units > 0 && segment.last_is_named != 0);
}

}  // namespace tandem::cuda
