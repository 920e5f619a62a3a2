// SPDX-License-Identifier: MIT
// Keeps the best of a block's candidates, once all of them have scores.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem {

using ChunkList = std::vector<int32_t>;  // ascending

// Chunks [first, first + n), or the first n parts of listed chunks, which have 2^part_shift each.
struct Candidates {
  int64_t first = 0, n = 0;
  const int32_t* listed = nullptr;
  int32_t part_shift = 0;
  int64_t chunk(int64_t i) const {
    if (listed == nullptr) return first + i;
    return (int64_t{listed[i >> part_shift]} << part_shift) + (i & ((int64_t{1} << part_shift) - 1));
  }
  // How many candidates follow each other from the i-th on, of those before `end`.
  int64_t n_following(int64_t i, int64_t end) const;
};

struct ScoredCandidates {
  const Candidates& from;
  const float* scores = nullptr;  // [n_heads][from.n]; a chunk's score is its largest
  int32_t n_heads = 1;
  int64_t n_kept = 0;      // less than from.n
  bool plus_next = false;  // each kept chunk brings the next one, which may be no candidate
  int64_t chunks_end = 0;  // chunks from here on are not brought
};

// Work space that is used again.
struct RankScratch {
  std::vector<uint32_t> order, ranked;
};

// Of equal scores the lower chunk is kept. A NaN is kept before all numbers.
void keep_best(const ScoredCandidates& of, RankScratch& scratch, ChunkList* kept);

}  // namespace tandem
