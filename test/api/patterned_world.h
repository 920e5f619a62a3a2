// SPDX-License-Identifier: MIT
// Shared by the tests of policy "patterns": head patterns, and options of a session that uses them.
#pragma once

#include "pruned_world.h"

namespace tandem_test {

inline const tandem_head_pattern kFull = TANDEM_HEAD_PATTERN_INIT;

inline tandem_head_pattern a_shape(int64_t sinks, int64_t window) {
  tandem_head_pattern pattern = TANDEM_HEAD_PATTERN_INIT;
  pattern.kinds = TANDEM_PATTERN_A_SHAPE;
  pattern.sink_tokens = sinks;
  pattern.window_tokens = window;
  return pattern;
}

inline tandem_head_pattern vertical_slash(int64_t columns, int64_t diagonals) {
  tandem_head_pattern pattern = TANDEM_HEAD_PATTERN_INIT;
  pattern.kinds = TANDEM_PATTERN_VERTICAL_SLASH;
  pattern.vertical_tokens = columns;
  pattern.slash_tokens = diagonals;
  return pattern;
}

inline tandem_head_pattern block_sparse(int64_t n_blocks) {
  tandem_head_pattern pattern = TANDEM_HEAD_PATTERN_INIT;
  pattern.kinds = TANDEM_PATTERN_BLOCK_SPARSE;
  pattern.n_blocks = n_blocks;
  return pattern;
}

// Returns a pattern that attends the keys of both given patterns. The two patterns must not use the same size.
inline tandem_head_pattern both(const tandem_head_pattern& a, const tandem_head_pattern& b) {
  tandem_head_pattern pattern = a;
  pattern.kinds |= b.kinds;
  pattern.sink_tokens += b.sink_tokens;
  pattern.window_tokens += b.window_tokens;
  pattern.vertical_tokens += b.vertical_tokens;
  pattern.slash_tokens += b.slash_tokens;
  pattern.n_blocks += b.n_blocks;
  return pattern;
}

inline int64_t n_heads_of(const std::vector<tandem_layer_options>& layers) {
  int64_t n = 0;
  for (const tandem_layer_options& layer : layers) n += layer.n_q_heads;
  return n;
}

// Options of a session whose n_heads query heads take these patterns in turn, layer by layer.
struct Patterned {
  std::vector<tandem_head_pattern> heads;
  tandem_patterns patterns = TANDEM_PATTERNS_INIT;
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;

  Patterned(int64_t n_heads, const std::vector<tandem_head_pattern>& in_turn) {
    for (int64_t h = 0; h < n_heads; ++h) heads.push_back(in_turn[heads.size() % in_turn.size()]);
    patterns.heads = heads.data();
    patterns.n_heads = n_heads;
    options.policy = "patterns";
    options.patterns = &patterns;
  }
  Patterned(const Patterned&) = delete;
};

}  // namespace tandem_test
