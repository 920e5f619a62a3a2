// SPDX-License-Identifier: MIT
// Turns an additive mask into ranges of attended keys.
//
// A mask has a row for each query token and a column for each key. -inf hides the key; every other value is added to the
// logit. A row becomes a list of ranges of visible columns. Consecutive tokens whose lists fit together form a group. One
// job attends a group, over the union of its ranges:
//
//   column   0 . . . . . . . . 9
//   token 0  x x x - x              each row is the union from some column on, up to a later end than the row before:
//   token 1  x x x - x x            a group of which each token has a begin and an end
//   token 2    x x - x x x
//   token 3  - - - - - - - - x x    nothing in common with the rows above: a group of its own
//
// Some groups share most of their keys but do not fit together, as branches of a speculative tree do. They become one group
// whose tokens have a bit for each key, from the first key on that not all of them see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lib/tables/backend.h"

namespace tandem {

struct KeyRange {
  int64_t begin, end;
};

// The ranges of one row, ascending, with a gap between neighbours.
struct MaskRow {
  const KeyRange* ranges = nullptr;
  int64_t n = 0;
};

// Appends the visible ranges of a row of n values, f32 or f16. Returns true if a visible value is not 0.
bool scan_mask_row(int32_t dtype, const void* row, int64_t n, std::vector<KeyRange>* ranges);

// Tokens [first, end) of a sequence, which one job attends. MaskGroups::begin and end have the visible range of each of
// these tokens, from index `first` on. The group's bits begin at MaskGroups::bits[bits_at].
struct TokenGroup {
  int64_t first = 0, end = 0;
  std::vector<KeyRange> keys;  // union of the keys that the tokens see
  int64_t n_keys = 0;
  int64_t tree_begin = INT64_MAX;  // if there are bits: the first column that not all tokens see
  int32_t tree_words = 0;
  size_t bits_at = 0;
};

struct MaskGroups {
  std::vector<TokenGroup> groups;
  std::vector<int64_t> begin, end;  // [n_tokens]
  std::vector<uint64_t> bits;

  Visibility visibility_of(const TokenGroup& group) const;
};

// Groups the tokens that have these rows.
void group_tokens(const std::vector<MaskRow>& rows, MaskGroups* groups);

}  // namespace tandem
