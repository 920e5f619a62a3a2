// SPDX-License-Identifier: MIT
// Options of a policy with head patterns: the patterns of each query head of a layer. A head attends the union of its
// patterns' keys. patterns.h of the ABI explains each number.
#pragma once

#include <cstdint>
#include <iterator>
#include <vector>

#include "lib/base/status.h"
#include "lib/model/layer.h"

namespace tandem {

inline constexpr int64_t kPatternBlock = TANDEM_PATTERN_BLOCK;  // queries that attend the same keys
inline constexpr int64_t kPatternChunk = TANDEM_PATTERN_CHUNK;  // queries with the same columns and diagonals
inline constexpr int64_t kPatternUnit = TANDEM_PATTERN_UNIT;    // tokens per unit of named keys
inline constexpr int32_t kPatternUnitShift = 3;
constexpr int64_t pattern_units(int64_t n_tokens) { return (n_tokens + kPatternUnit - 1) / kPatternUnit; }
static_assert(kPatternUnit == int64_t{1} << kPatternUnitShift && kPatternChunk % kPatternBlock == 0);

struct HeadPattern {
  uint32_t kinds = TANDEM_PATTERN_FULL;  // patterns whose keys are united; FULL excludes all others
  int64_t sink_len = 0, window_len = 0;
  int64_t vertical_len = 0, slash_len = 0;
  int64_t n_blocks = 0;

  bool has(uint32_t kind) const { return (kinds & kind) != 0; }
  // True if positions alone determine the keys: FULL or A_SHAPE.
  bool is_known_ahead() const { return (kinds & ~(TANDEM_PATTERN_FULL | TANDEM_PATTERN_A_SHAPE)) == 0; }
  bool operator==(const HeadPattern&) const = default;
};

// Keys of a KV head in calls with one query: all keys, or the first sink_len and the newest window_len.
struct DecodeKeys {
  bool are_all = true;
  int64_t sink_len = 0, window_len = 0;
};

// Keys of a head whose window begins at a given token: the first n_units units and the tokens from `begin` on.
struct SinksAndRange {
  int64_t n_units = 0, begin = 0;

  SinksAndRange(bool is_full, int64_t sink_len, int64_t window_begin) {
    if (is_full || window_begin <= pattern_units(sink_len) * kPatternUnit) return;
    n_units = pattern_units(sink_len);
    begin = window_begin;
  }
  int64_t sink_end() const { return n_units * kPatternUnit; }
};
// Returns the keys of the query at this token.
inline SinksAndRange keys_of_query(const DecodeKeys& head, int64_t token) {
  return {head.are_all, head.sink_len, token + 1 - head.window_len};
}

struct PatternsOfLayer {
  std::vector<HeadPattern> heads;  // [n_q_heads]
  std::vector<DecodeKeys> decode;  // [n_kv_heads]
  uint32_t kinds = 0;              // of all heads
  bool groups_are_alike = false;   // the query heads of each KV head attend the same keys: FULL, or the same A_SHAPE
  int64_t max_distance = 0;        // keys further from their query are attended as if at this distance; 0: no limit

  // Returns the patterns of a list head. If groups are alike there is one list head per KV head, and its first query head
  // stands for all. Otherwise each query head is a list head.
  const HeadPattern& of_list(int64_t list_head) const {
    return heads[static_cast<size_t>(groups_are_alike ? list_head * std::ssize(heads) / std::ssize(decode) : list_head)];
  }
  int64_t most_sink_units() const;
  bool are_known_ahead() const;
  bool narrows_decode() const;  // true if some KV head attends fewer than all keys in decode calls
};

using Patterns = std::vector<PatternsOfLayer>;  // [n_layers]; empty: no layer's policy follows patterns

// known_kinds: the TANDEM_PATTERN_* bits that exist. follows: [n_layers], true for layers whose policy follows patterns.
// INVALID_ARGUMENT (patterns and its members), UNSUPPORTED (patterns.max_distance, patterns.heads[i].kinds).
Status resolve_patterns(const tandem_session_options& options, uint32_t known_kinds, const std::vector<bool>& follows,
                        const std::vector<Layer>& layers, Patterns* patterns);

}  // namespace tandem
