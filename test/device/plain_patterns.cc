// SPDX-License-Identifier: MIT
#include "device/plain_patterns.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "device/stand_in_sums.h"

namespace tandem::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool contains(const std::vector<int64_t>& ascending, int64_t x) {
  return std::binary_search(ascending.begin(), ascending.end(), x);
}

// True if the distance of some query of [begin, end) from the token lies in a chosen band. The queries come after the token.
bool is_in_band(const std::vector<int64_t>& bands, int64_t token, int64_t begin, int64_t end) {
  for (int64_t band = (begin - token) / kPatternBand; band <= (end - 1 - token) / kPatternBand; ++band)
    if (contains(bands, band)) return true;
  return false;
}

bool names_unit(const PlainPattern& pattern, const ChosenKeys& chosen, int64_t block, int64_t unit) {
  const int64_t begin = pattern.block_begin(block), end = std::min(pattern.end, begin + kPatternBlock);
  if (pattern.has(TANDEM_PATTERN_A_SHAPE) && unit < pattern_units(pattern.head.sink_len)) return true;
  for (int64_t token = unit * kPatternUnit; token < std::min(begin, (unit + 1) * kPatternUnit); ++token) {
    if (pattern.has(TANDEM_PATTERN_VERTICAL_SLASH) &&
        (contains(chosen.tokens, token) || is_in_band(chosen.bands, token, begin, end)))
      return true;
    if (pattern.has(TANDEM_PATTERN_BLOCK_SPARSE) &&
        contains(chosen.key_blocks[static_cast<size_t>(block)], token / kPatternKeyBlock))
      return true;
  }
  return false;
}

}  // namespace

WeightSums sum_weights(const PlainPattern& pattern) {
  WeightSums sums;
  sums.tokens.assign(static_cast<size_t>(pattern.end), 0.0);
  sums.bands.assign(static_cast<size_t>((pattern.end - 1) / kPatternBand + 1), 0.0);
  std::vector<Row> keys;
  for (int64_t token = 0; token < pattern.end; ++token) keys.push_back(pattern.key(token));
  for (int64_t query = std::max<int64_t>(0, pattern.q_len - kPatternProbes); query < pattern.q_len; ++query) {
    const Row q = pattern.query(query);
    const int64_t own = pattern.first_token() + query;
    std::vector<double> logits;
    for (int64_t token = 0; token <= own; ++token)
      logits.push_back(pattern.scale * stand_in::dot(q.data(), keys[static_cast<size_t>(token)].data(), q.size()));
    const double most = *std::max_element(logits.begin(), logits.end());
    double sum = 0.0;
    for (const double logit : logits) sum += std::exp(logit - most);
    for (int64_t token = 0; token <= own; ++token) {
      const double weight = std::exp(logits[static_cast<size_t>(token)] - most) / sum;
      sums.tokens[static_cast<size_t>(token)] += weight;
      sums.bands[static_cast<size_t>((own - token) / kPatternBand)] += weight;
    }
  }
  sums.bands[0] = kInfinity;
  return sums;
}

std::vector<double> score_key_blocks(const PlainPattern& pattern, int64_t block) {
  const int64_t first = block * kPatternBlock, n = std::min(kPatternBlock, pattern.q_len - first);
  Row mean_q(pattern.query(0).size(), 0.0);
  for (int64_t query = first; query < first + n; ++query)
    stand_in::add_scaled(mean_q.data(), 1.0 / static_cast<double>(n), pattern.query(query).data(), mean_q.size());
  std::vector<double> scores;
  for (int64_t token = 0; token + kPatternKeyBlock <= pattern.block_begin(block); token += kPatternKeyBlock) {
    Row mean_k(mean_q.size(), 0.0);
    for (int64_t i = 0; i < kPatternKeyBlock; ++i)
      stand_in::add_scaled(mean_k.data(), 1.0 / kPatternKeyBlock, pattern.key(token + i).data(), mean_k.size());
    scores.push_back(pattern.scale * stand_in::dot(mean_q.data(), mean_k.data(), mean_q.size()));
  }
  return scores;
}

std::vector<int64_t> choose(const std::vector<double>& scores, int64_t n) {
  std::vector<int64_t> order(scores.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  const auto score = [&](int64_t i) {
    const double x = scores[static_cast<size_t>(i)];
    return std::isnan(x) ? -kInfinity : x;
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return score(a) > score(b); });
  order.resize(static_cast<size_t>(std::min<int64_t>(n, static_cast<int64_t>(order.size()))));
  std::sort(order.begin(), order.end());
  return order;
}

ChosenKeys choose_keys(const PlainPattern& pattern) {
  ChosenKeys chosen;
  if (pattern.has(TANDEM_PATTERN_VERTICAL_SLASH)) {
    const WeightSums sums = sum_weights(pattern);
    chosen.tokens = choose(sums.tokens, pattern.head.n_tokens);
    chosen.bands = choose(sums.bands, pattern.head.n_bands);
  }
  for (int64_t block = 0; block < pattern.n_blocks() && pattern.has(TANDEM_PATTERN_BLOCK_SPARSE); ++block)
    chosen.key_blocks.push_back(choose(score_key_blocks(pattern, block), pattern.head.n_blocks));
  return chosen;
}

int64_t range_begin(const PlainPattern& pattern, int64_t block) {
  const int64_t p0 = pattern.block_begin(block);
  if (pattern.has(TANDEM_PATTERN_FULL)) return 0;
  int64_t begin = p0;
  if (pattern.has(TANDEM_PATTERN_A_SHAPE)) begin = std::clamp<int64_t>(p0 + 1 - pattern.head.window_len, 0, begin);
  if (pattern.has(TANDEM_PATTERN_BLOCK_SPARSE)) begin = std::min(begin, p0 / kPatternKeyBlock * kPatternKeyBlock);
  return begin;
}

std::vector<int64_t> named_tokens(const PlainPattern& pattern, const ChosenKeys& chosen, int64_t block) {
  std::vector<int64_t> tokens;
  const int64_t end = range_begin(pattern, block);
  for (int64_t unit = 0; unit < pattern_units(end); ++unit) {
    if (!names_unit(pattern, chosen, block, unit)) continue;
    for (int64_t token = unit * kPatternUnit; token < std::min(end, (unit + 1) * kPatternUnit); ++token)
      tokens.push_back(token);
  }
  return tokens;
}

}  // namespace tandem::test
