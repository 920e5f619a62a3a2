// SPDX-License-Identifier: MIT
#include "tools/bench/bench_patterns.h"

#include <algorithm>

#include "tools/patterns/pattern_heads.h"

namespace tools {
namespace {

constexpr int64_t kSparseBlock = 64;  // tokens of a block of BLOCK_SPARSE

bool is_full(const tandem_head_pattern& head) { return head.kinds == 0 || (head.kinds & TANDEM_PATTERN_FULL) != 0; }

int64_t in_units(int64_t n_tokens) {
  return (n_tokens + TANDEM_PATTERN_UNIT - 1) / TANDEM_PATTERN_UNIT * TANDEM_PATTERN_UNIT;
}

// Returns the first sink_tokens and the keys from `begin` on.
VisibleRange sinks_and(int64_t sink_tokens, int64_t begin, int64_t end) {
  return {std::min(in_units(sink_tokens), begin), begin, end};
}

// In calls of one query the KV head decides. The query attends sinks and a window if all query heads of the group have
// A_SHAPE alone, else all keys.
VisibleRange range_of_one(const tandem_head_pattern* group, int64_t group_size, int64_t position) {
  int64_t sinks = 0, window = 0;
  for (int64_t g = 0; g < group_size; ++g) {
    if (group[g].kinds != TANDEM_PATTERN_A_SHAPE) return {0, 0, position + 1};
    sinks = std::max(sinks, group[g].sink_tokens);
    window = std::max(window, group[g].window_tokens);
  }
  return sinks_and(sinks, std::max<int64_t>(0, position + 1 - window), position + 1);
}

int64_t least_keys_of_append(const tandem_head_pattern& head) {
  if (is_full(head)) return INT64_MAX;
  return std::max(
      {head.sink_tokens + head.window_tokens, head.vertical_tokens, head.slash_tokens, head.n_blocks * kSparseBlock});
}

}  // namespace

Result read_bench_patterns(const LayerHeads& layer, BenchPatterns* patterns) {
  PatternHeads file;
  TOOL_TRY(read_model_heads(patterns->path, {0, layer.n_q_heads, layer.n_kv_heads}, &file));
  if (patterns->layer_idx >= file.n_layers)
    return refuse("--pattern-layer = %lld: --patterns = %s has layers 0 to %lld",
                  static_cast<long long>(patterns->layer_idx), patterns->path.c_str(),
                  static_cast<long long>(file.n_layers - 1));
  const auto first = file.heads.begin() + patterns->layer_idx * file.n_heads;
  patterns->heads.assign(first, first + file.n_heads);
  return {};
}

bool is_known_ahead(const tandem_head_pattern& head, int64_t q_len) {
  return q_len == 1 || is_full(head) || head.kinds == TANDEM_PATTERN_A_SHAPE;
}

VisibleRange pattern_range(const std::vector<tandem_head_pattern>& heads, const PatternQuery& query) {
  const int64_t position = query.first_query + query.token;
  if (query.q_len == 1)
    return range_of_one(heads.data() + query.q_head / query.group_size * query.group_size, query.group_size, position);
  const tandem_head_pattern& head = heads[static_cast<size_t>(query.q_head)];
  if (is_full(head)) return {0, 0, position + 1};
  const int64_t block = query.first_query + query.token / TANDEM_PATTERN_BLOCK * TANDEM_PATTERN_BLOCK;
  return sinks_and(head.sink_tokens, std::max<int64_t>(0, block + 1 - head.window_tokens), position + 1);
}

int64_t last_block(int64_t q_len) { return (q_len - 1) / TANDEM_PATTERN_BLOCK * TANDEM_PATTERN_BLOCK; }

int64_t least_keys(const std::vector<tandem_head_pattern>& heads, int64_t group_size, int64_t q_len, int64_t kv_len) {
  const auto n_heads = static_cast<int64_t>(heads.size());
  int64_t sum = 0;
  for (int64_t first = 0; first < n_heads; first += group_size) {
    int64_t most = q_len == 1 ? range_of_one(heads.data() + first, group_size, kv_len - 1).n_keys() : q_len;
    for (int64_t g = 0; g < group_size && q_len > 1; ++g)
      most = std::max(most, std::min(kv_len, least_keys_of_append(heads[static_cast<size_t>(first + g)])));
    sum += most;
  }
  return std::max<int64_t>(1, sum / (n_heads / group_size));
}

}  // namespace tools
