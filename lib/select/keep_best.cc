// SPDX-License-Identifier: MIT
#include "lib/select/keep_best.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <span>

namespace tandem {
namespace {

// Maps a score to an integer with the same order. NaN ranks above all numbers, so its chunk is kept.
uint32_t ordered(float score) {
  if (std::isnan(score)) return UINT32_MAX;
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Returns the least of the *n largest scores, and sets *n to how many of these equal it. Counts the scores in 256 parts of
// their range first, so that only the scores of one part are ranked.
uint32_t least_kept(std::span<const uint32_t> scores, int64_t* n, std::vector<uint32_t>* ranked) {
  uint32_t lowest = UINT32_MAX, highest = 0;
  for (const uint32_t score : scores) lowest = std::min(lowest, score), highest = std::max(highest, score);
  const int shift = std::max(0, static_cast<int>(std::bit_width(highest - lowest)) - 8);
  std::array<int32_t, 256> counts{};
  for (const uint32_t score : scores) ++counts[(score - lowest) >> shift];
  uint32_t part = 255;
  for (; *n > counts[part]; --part) *n -= counts[part];
  ranked->resize(scores.size());
  auto end = ranked->begin();
  for (const uint32_t score : scores) {
    *end = score;
    end += (score - lowest) >> shift == part ? 1 : 0;
  }
  const auto last = ranked->begin() + static_cast<std::ptrdiff_t>(*n) - 1;
  std::nth_element(ranked->begin(), last, end, std::greater<>());
  *n -= std::count_if(ranked->begin(), last, [&](uint32_t score) { return score > *last; });
  return *last;
}

}  // namespace

int64_t Candidates::n_following(int64_t i, int64_t end) const {
  int64_t n_found = 1;
  while (i + n_found < end && chunk(i + n_found) == chunk(i) + n_found) ++n_found;
  return n_found;
}

// Finds the least score that is kept first. One pass over the candidates then makes an ascending list.
void keep_best(const ScoredCandidates& of, RankScratch& scratch, ChunkList* kept) {
  const int64_t n = of.from.n;
  scratch.order.resize(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    uint32_t most = 0;
    for (int32_t h = 0; h < of.n_heads; ++h) most = std::max(most, ordered(of.scores[h * n + i]));
    scratch.order[static_cast<size_t>(i)] = most;
  }
  int64_t n_equal = of.n_kept;  // how many candidates with the least score are kept
  const uint32_t least = least_kept(scratch.order, &n_equal, &scratch.ranked);
  // Several workers write lists that lie side by side, so a list's size is set once, not with each chunk.
  kept->resize(static_cast<size_t>(of.plus_next ? 2 * of.n_kept : of.n_kept));
  int32_t* to = kept->data();
  int64_t newest = -1;
  const auto put = [&](int64_t chunk) {
    if (chunk > newest) *to++ = static_cast<int32_t>(newest = chunk);
  };
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t score = scratch.order[static_cast<size_t>(i)];
    if (score < least || (score == least && n_equal-- <= 0)) continue;
    const int64_t chunk = of.from.chunk(i);
    put(chunk);
    if (of.plus_next && chunk + 1 < of.chunks_end) put(chunk + 1);
  }
  kept->resize(static_cast<size_t>(to - kept->data()));
}

}  // namespace tandem
