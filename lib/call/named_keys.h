// SPDX-License-Identifier: MIT
// Keys that a call's caller names for each query (tandem_selection in selection.h).
//
// A row has the indices of units of 2^unit_shift neighbouring tokens. A query attends the tokens of these units that it
// could see without a selection. for_named_tokens() walks over these tokens, range by range.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "lib/base/status.h"
#include "lib/policy/pruning.h"
#include "lib/store/row_cursor.h"

namespace tandem {

inline constexpr int64_t kMostUnitTokens = 256;

struct NamedKeys {
  const int32_t* idx = nullptr;  // [n_tokens, n_heads, n_idx], the last dimension contiguous
  int64_t token_stride = 0, head_stride = 0;
  int64_t n_idx = 0;
  int32_t n_heads = 1;  // 1: all KV heads attend the same keys
  int32_t unit_shift = 0;
  bool on_device = false;    // idx is a device address
  bool any_order = false;    // the indices of a row need not ascend
  bool plus_window = false;  // sinks and newest keys are attended as well

  std::span<const int32_t> row(int64_t token, int32_t kv_head) const {
    return {idx + token * token_stride + (n_heads == 1 ? 0 : kv_head) * head_stride, static_cast<size_t>(n_idx)};
  }
};

// The keys of a block of queries in one head: units, and all tokens from newest_begin on.
struct NamedRow {
  const int32_t* idx = nullptr;
  int64_t n = 0;
  int64_t newest_begin = 0;
};

// The rows of one sequence's queries in a call. query_block queries share a row, and the first block has the row `first`.
// plus_window counts from a block's first query, or from an earlier one (window_queries).
struct QueryNames {
  NamedKeys keys;
  int64_t first = 0;
  int64_t query_block = 1;  // the last block of a call may have fewer
  // For each block, the query that sets where its window begins: window_len - 1 tokens before this query. Null: the block's
  // first query. It is at most kMostQueryBlock - 1 queries before the block's first.
  const int64_t* window_queries = nullptr;
  int64_t sink_len = 0, window_len = 0;  // what plus_window adds
  // Replaces the indices and the window above where heads have their own windows: [n_blocks][n_heads of `keys`].
  const NamedRow* rows = nullptr;
  int64_t version = 0;  // not 0: equal versions of one sequence and layer have equal rows

  int64_t window_query(int64_t query) const {
    return window_queries != nullptr ? window_queries[query / query_block] : query;
  }
  std::span<const int32_t> row(int64_t query, int32_t head) const {
    if (rows == nullptr) return keys.row(first + query / query_block, head);
    const NamedRow& own = of_head(query, head);
    return {own.idx, static_cast<size_t>(own.n)};
  }
  // For plus_window. newest: the query that the window ends with, as an index in its chain of tokens.
  int64_t newest_begin(int64_t query, int32_t head, int64_t newest) const {
    return rows != nullptr ? of_head(query, head).newest_begin : std::max<int64_t>(0, newest + 1 - window_len);
  }

 private:
  const NamedRow& of_head(int64_t query, int32_t head) const { return rows[query / query_block * keys.n_heads + head]; }
};

// What a query could see without a selection: tokens [begin, own]; from tree_begin on, only its ancestors.
struct SeenTokens {
  int64_t begin = 0, own = 0;
  int64_t tree_begin = INT64_MAX;
  const uint64_t* tree_bits = nullptr;  // bit i: token tree_begin + i is an ancestor, or the query itself
  // For plus_window: tokens [0, sink_end) and [newest_begin, tree_begin), the first n_first_ancestors ancestors, and the
  // newest n_newest_ancestors.
  int64_t sink_end = 0, newest_begin = INT64_MAX, n_first_ancestors = 0, n_newest_ancestors = 0;

  bool is_ancestor(int64_t token) const {
    const auto bit = static_cast<uint64_t>(token - tree_begin);
    return (tree_bits[bit / 64] >> (bit % 64) & 1) != 0;
  }
};

// Copies the indices, rows contiguous, and points `named` at the copy. With any_order, sorts each row and puts its pads
// last.
void copy_named(int64_t n_tokens, NamedKeys* named, std::vector<int32_t>* copy);
// Returns the first place of a sorted row whose index does not ascend, follows a pad, or names no token up to the query's
// own; -1 if there is none.
int64_t first_wrong(std::span<const int32_t> row, int32_t unit_shift, int64_t own);
// Checks the rows of n queries from `token` on; the first query is token own_of_first of its sequence. INVALID_ARGUMENT
// (selection.idx): an index is repeated, does not ascend, or names a token after the query's own. as_given: the caller's
// rows.
Status check_named(const NamedKeys& named, const NamedKeys& as_given, int64_t token, int64_t n, int64_t own_of_first);

// Calls visit(TokenRange) for each range of tokens that a query attends, in ascending order. Ranges do not touch each other.
template <typename Visit>
void for_named_tokens(const NamedKeys& named, std::span<const int32_t> row, const SeenTokens& seen, Visit visit) {
  TokenRange pending{0, 0};
  const auto put = [&](int64_t begin, int64_t end) {
    begin = std::max(begin, pending.end);
    if (begin >= end) return;
    if (pending.begin < pending.end && begin == pending.end) {
      pending.end = end;
      return;
    }
    if (pending.begin < pending.end) visit(pending);
    pending = {begin, end};
  };
  const int64_t before_tree = std::min(seen.tree_begin, seen.own + 1),
                end_of_named = std::min(seen.newest_begin, before_tree);
  const auto put_ancestors = [&](int64_t begin, int64_t end) {
    for (int64_t token = std::max(begin, seen.tree_begin); token < std::min(end, seen.own + 1); ++token)
      if (seen.is_ancestor(token)) put(token, token + 1);
  };
  int64_t newest_ancestor = seen.own + 1;  // the first of the newest ancestors of plus_window
  for (int64_t n = seen.n_newest_ancestors; n > 0 && newest_ancestor > seen.tree_begin; --newest_ancestor)
    if (seen.is_ancestor(newest_ancestor - 1)) --n;
  int64_t first_ancestors_end = seen.tree_begin;
  for (int64_t n = seen.n_first_ancestors; n > 0 && first_ancestors_end <= seen.own; ++first_ancestors_end)
    if (seen.is_ancestor(first_ancestors_end)) --n;
  put(seen.begin, std::min(seen.sink_end, before_tree));
  bool is_in_tree = false;
  const auto enter_tree = [&] {
    if (is_in_tree) return;
    is_in_tree = true;
    put(std::max(seen.newest_begin, seen.begin), before_tree);
    put_ancestors(seen.tree_begin, first_ancestors_end);
  };
  for (const int32_t unit : row) {
    if (unit < 0) break;
    const int64_t begin = int64_t{unit} << named.unit_shift, end = begin + (int64_t{1} << named.unit_shift);
    put(std::max(begin, seen.begin), std::min(end, end_of_named));
    if (end <= seen.tree_begin) continue;
    enter_tree();
    put_ancestors(begin, std::min(end, newest_ancestor));
  }
  enter_tree();
  put_ancestors(newest_ancestor, seen.own + 1);
  if (pending.begin < pending.end) visit(pending);
}

// The keys that one block of queries has named, kept so that a caller can list them later.
class NotedKeys {
 public:
  NotedKeys() = default;
  NotedKeys(NotedKeys&&) = default;  // a move keeps the address of idx_'s data, to which keys_ points
  NotedKeys& operator=(NotedKeys&&) = default;
  void clear() { keys_.n_heads = 0, version_ = 0; }
  bool is_empty() const { return keys_.n_heads == 0; }
  int32_t n_heads() const { return keys_.n_heads; }  // 1: all heads have the same keys
  // Notes the block that begins with `query`. is_checked: no row is wrong. May throw bad_alloc.
  void note(const QueryNames& names, int64_t query, const SeenTokens& seen, int32_t tree_words, bool is_checked);
  // Calls visit(TokenRange) as for_named_tokens() does. A wrong row has no tokens.
  template <typename Visit>
  void for_tokens(int32_t head, Visit visit) const {
    const std::span<const int32_t> row = keys_.row(0, head);
    SeenTokens seen = seen_;
    if (!newest_begins_.empty()) seen.newest_begin = newest_begins_[static_cast<size_t>(head)];
    if (is_checked_ || first_wrong(row, keys_.unit_shift, seen.own) < 0) for_named_tokens(keys_, row, seen, visit);
  }

 private:
  NamedKeys keys_{.n_heads = 0};
  SeenTokens seen_;
  std::vector<int32_t> idx_;            // of keys_
  std::vector<int64_t> newest_begins_;  // one for each head, where heads have their own windows
  std::vector<uint64_t> tree_;          // of seen_
  int64_t version_ = 0;
  bool is_checked_ = true;
};

}  // namespace tandem
