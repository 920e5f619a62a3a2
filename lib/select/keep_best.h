// SPDX-License-Identifier: MIT
// Keeps the best of a block's candidates, once all of them are scored.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem {

using ChunkList = std::vector<int32_t>;  // ascending

// Either chunks [first, first + n), or the first n parts of the listed chunks. A listed chunk has 2^part_shift parts.
struct Candidates {
  int64_t first = 0, n = 0;
  const int32_t* listed = nullptr;
  int32_t part_shift = 0;
  int64_t chunk(int64_t i) const {
    if (listed == nullptr) return first + i;
    return (int64_t{listed[i >> part_shift]} << part_shift) + (i & ((int64_t{1} << part_shift) - 1));
  }
  // Returns how many candidates before `end`, from the i-th on, are consecutive chunks.
  int64_t n_following(int64_t i, int64_t end) const;
};

struct ScoredCandidates {
  const Candidates& from;
  const float* scores = nullptr;  // [n_heads][from.n]; a chunk's score is its largest
  int32_t n_heads = 1;
  int64_t n_kept = 0;      // less than from.n
  bool plus_next = false;  // each kept chunk also brings the next chunk, which need not be a candidate
  int64_t chunks_end = 0;  // next chunks from here on are not brought
};

// Work space that callers reuse.
struct RankScratch {
  std::vector<uint32_t> order, ranked;
};

// Writes the chunks with the largest scores, ascending. Ties keep the lower chunk. NaN ranks above all numbers.
void keep_best(const ScoredCandidates& of, RankScratch& scratch, ChunkList* kept);

}  // namespace tandem
