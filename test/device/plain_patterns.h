// SPDX-License-Identifier: MIT
// The keys that head patterns choose and that blocks of queries then attend, in double precision. The code follows the words
// of lib/tables/pattern_lists.h: one key, one band and one unit at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lib/policy/head_patterns.h"
#include "lib/tables/pattern_lists.h"

namespace tandem::test {

using Row = std::vector<double>;

// One query head of one sequence.
struct PlainPattern {
  DeviceHeadPattern head;
  int64_t end = 0, q_len = 0;
  double scale = 0.0;

  std::function<Row(int64_t token)> key;    // row of the head's KV head
  std::function<Row(int64_t query)> query;  // query 0 is token first_token()

  int64_t first_token() const { return end - q_len; }
  int64_t n_blocks() const { return (q_len + kPatternBlock - 1) / kPatternBlock; }
  int64_t block_begin(int64_t block) const { return first_token() + block * kPatternBlock; }  // as a token
  bool has(uint32_t kind) const { return (head.kinds & kind) != 0; }
};

// The sums of the probes' weights for each token and for each band. Band 0 has infinity.
struct WeightSums {
  std::vector<double> tokens, bands;
};
WeightSums sum_weights(const PlainPattern& pattern);
// Returns the scores of the key blocks that a block of queries chooses from.
std::vector<double> score_key_blocks(const PlainPattern& pattern, int64_t block);

// Returns the n best, ascending. Of equal scores the lower index is better. NaN counts as -infinity.
std::vector<int64_t> choose(const std::vector<double>& scores, int64_t n);

struct ChosenKeys {
  std::vector<int64_t> tokens, bands;
  std::vector<std::vector<int64_t>> key_blocks;  // for each block of queries
};
ChosenKeys choose_keys(const PlainPattern& pattern);

int64_t range_begin(const PlainPattern& pattern, int64_t block);
// Returns the tokens before range_begin() that the block attends, ascending.
std::vector<int64_t> named_tokens(const PlainPattern& pattern, const ChosenKeys& chosen, int64_t block);

}  // namespace tandem::test
