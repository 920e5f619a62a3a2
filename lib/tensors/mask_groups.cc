// SPDX-License-Identifier: MIT
#include "lib/tensors/mask_groups.h"

#include <algorithm>
#include <cstring>

namespace tandem {
namespace {

constexpr int64_t kMostWords = int64_t{8} << 20;  // most words of bits of one group: 64 MiB

int64_t count(const std::vector<KeyRange>& ranges) {
  int64_t n = 0;
  for (const KeyRange& range : ranges) n += range.end - range.begin;
  return n;
}

// Classifies the values of a mask by their bits.
template <typename Word, Word kSign, Word kInfinity>
struct MaskValues {
  using Type = Word;
  static bool is_zero(Word x) { return static_cast<Word>(x & static_cast<Word>(~kSign)) == 0; }
  static bool is_hidden(Word x) { return x == (kSign | kInfinity); }
};
using MaskF32 = MaskValues<uint32_t, 0x80000000u, 0x7f800000u>;
using MaskF16 = MaskValues<uint16_t, 0x8000, 0x7c00>;

// Masks have long stretches of one value, so a block that is all 0 or all -inf is handled as a whole.
template <typename Values>
bool scan_row(const void* row, int64_t n, std::vector<KeyRange>* ranges) {
  using Word = typename Values::Type;
  constexpr int64_t kBlock = 64;
  const size_t first = ranges->size();
  bool has_values = false;
  const auto show = [&](int64_t begin, int64_t end) {
    if (ranges->size() > first && ranges->back().end == begin)
      ranges->back().end = end;
    else
      ranges->push_back({begin, end});
  };
  for (int64_t at = 0; at < n; at += kBlock) {
    Word block[kBlock];
    const int64_t n_block = std::min(kBlock, n - at);
    std::memcpy(block, static_cast<const Word*>(row) + at, static_cast<size_t>(n_block) * sizeof(Word));
    Word n_zero = 0, n_hidden = 0;  // as wide as the values, so that vectors count them
    for (int64_t i = 0; i < n_block; ++i) {
      n_zero = static_cast<Word>(n_zero + Values::is_zero(block[i]));
      n_hidden = static_cast<Word>(n_hidden + Values::is_hidden(block[i]));
    }
    if (n_hidden == n_block) continue;
    has_values = has_values || n_zero + n_hidden != n_block;
    if (n_hidden == 0) {
      show(at, at + n_block);
      continue;
    }
    for (int64_t i = 0; i < n_block; ++i)
      if (!Values::is_hidden(block[i])) show(at + i, at + i + 1);
  }
  return has_values;
}

// Extends the union by a row that sees the union's keys from some column on, and perhaps more keys behind them. Returns
// false if the row does not fit.
bool extend(const MaskRow& row, int64_t least_begin, std::vector<KeyRange>* keys) {
  if (keys->empty()) {
    keys->assign(row.ranges, row.ranges + row.n);
    return true;
  }
  const int64_t begin = row.ranges[0].begin;
  if (begin < least_begin || row.ranges[row.n - 1].end < keys->back().end) return false;
  const auto after = std::upper_bound(keys->begin(), keys->end(), begin,
                                      [](int64_t column, const KeyRange& range) { return column < range.end; });
  if (after == keys->end() || begin < after->begin) return false;
  const int64_t n_shared = keys->end() - after;
  if (row.n < n_shared) return false;
  for (int64_t i = 0; i < n_shared; ++i) {
    const KeyRange &ours = after[i], &its = row.ranges[i];
    if (i > 0 && its.begin != ours.begin) return false;
    if (i + 1 < n_shared ? its.end != ours.end : its.end < ours.end) return false;
  }
  keys->back().end = row.ranges[n_shared - 1].end;
  keys->insert(keys->end(), row.ranges + n_shared, row.ranges + row.n);
  return true;
}

std::vector<KeyRange> union_of(const std::vector<KeyRange>& a, const std::vector<KeyRange>& b) {
  std::vector<KeyRange> all(a.size() + b.size()), joined;
  std::merge(a.begin(), a.end(), b.begin(), b.end(), all.begin(),
             [](const KeyRange& x, const KeyRange& y) { return x.begin < y.begin; });
  for (const KeyRange& range : all) {
    if (!joined.empty() && range.begin <= joined.back().end)
      joined.back().end = std::max(joined.back().end, range.end);
    else
      joined.push_back(range);
  }
  return joined;
}

// Returns the first column of `keys` that a row does not see.
int64_t first_hidden(const std::vector<KeyRange>& keys, const MaskRow& row) {
  for (size_t i = 0; i < keys.size(); ++i) {
    if (static_cast<int64_t>(i) == row.n || row.ranges[i].begin != keys[i].begin) return keys[i].begin;
    if (row.ranges[i].end != keys[i].end) return row.ranges[i].end;
  }
  return INT64_MAX;
}

// Makes groups of consecutive tokens that fit together.
void find_chains(const std::vector<MaskRow>& rows, MaskGroups* out) {
  const auto n_tokens = static_cast<int64_t>(rows.size());
  out->begin.assign(rows.size(), 0);
  out->end.assign(rows.size(), 0);
  int64_t last_begin = 0, last_end = 0;
  for (int64_t t = 0; t < n_tokens; ++t) {
    const auto at = static_cast<size_t>(t);
    const MaskRow& row = rows[at];
    // A token without visible keys fits everywhere.
    const bool fits = t > 0 && (row.n == 0 || extend(row, last_begin, &out->groups.back().keys));
    if (!fits) {
      out->groups.emplace_back();
      out->groups.back().first = t;
      out->groups.back().keys.assign(row.ranges, row.ranges + row.n);
      last_begin = last_end = 0;
    }
    out->groups.back().end = t + 1;
    last_begin = row.n > 0 ? row.ranges[0].begin : last_end;
    last_end = row.n > 0 ? row.ranges[row.n - 1].end : last_end;
    out->begin[at] = last_begin;
    out->end[at] = last_end;
  }
  for (TokenGroup& group : out->groups) group.n_keys = count(group.keys);
}

// If ranges have fewer keys than this on average, they cost more than one bit for each key and token: a range becomes a run
// of 64 bytes for each KV head.
constexpr int64_t kShortRange = 16;

// Joins neighbouring groups if reading their keys once saves a quarter or more, or if their ranges are short.
void join_neighbours(MaskGroups* out) {
  size_t last = 0;
  for (size_t i = 1; i < out->groups.size(); ++i) {
    TokenGroup &a = out->groups[last], &b = out->groups[i];
    std::vector<KeyRange> keys = union_of(a.keys, b.keys);
    const int64_t n_keys = count(keys);
    const bool saves = 4 * n_keys <= 3 * (a.n_keys + b.n_keys);
    const bool short_ranges = static_cast<int64_t>(a.keys.size() + b.keys.size()) * kShortRange > n_keys;
    if (n_keys > 0 && (saves || short_ranges) && (b.end - a.first) * (keys.back().end / 64 + 1) <= kMostWords) {
      a.keys = std::move(keys);
      a.n_keys = n_keys;
      a.end = b.end;
      a.tree_words = 1;  // set_bits() sets the real number
    } else {
      ++last;
      if (last != i) out->groups[last] = std::move(b);
    }
  }
  out->groups.resize(std::min(out->groups.size(), last + 1));
}

void set_bits(const std::vector<MaskRow>& rows, TokenGroup* group, MaskGroups* out) {
  for (int64_t t = group->first; t < group->end; ++t)
    group->tree_begin = std::min(group->tree_begin, first_hidden(group->keys, rows[static_cast<size_t>(t)]));
  const int64_t first = group->tree_begin, last = group->keys.back().end;
  group->tree_words = static_cast<int32_t>((last - first + 63) / 64);
  group->bits_at = out->bits.size();
  out->bits.resize(group->bits_at + static_cast<size_t>((group->end - group->first) * group->tree_words));
  uint64_t* bits = out->bits.data() + group->bits_at;
  for (int64_t t = group->first; t < group->end; ++t, bits += group->tree_words) {
    const MaskRow& row = rows[static_cast<size_t>(t)];
    for (int64_t i = 0; i < row.n; ++i)
      for (int64_t c = std::max(row.ranges[i].begin, first); c < row.ranges[i].end; ++c)
        bits[(c - first) / 64] |= uint64_t{1} << ((c - first) % 64);
    out->begin[static_cast<size_t>(t)] = group->keys.front().begin;
    out->end[static_cast<size_t>(t)] = last;
  }
}

}  // namespace

bool scan_mask_row(int32_t dtype, const void* row, int64_t n, std::vector<KeyRange>* ranges) {
  return dtype == TANDEM_F32 ? scan_row<MaskF32>(row, n, ranges) : scan_row<MaskF16>(row, n, ranges);
}

Visibility MaskGroups::visibility_of(const TokenGroup& group) const {
  Visibility visibility;
  visibility.begin = begin.data() + group.first;
  visibility.end = end.data() + group.first;
  if (group.tree_words > 0) {
    visibility.tree_begin = group.tree_begin;
    visibility.tree_words = group.tree_words;
    visibility.tree_bits = bits.data() + group.bits_at;
  }
  return visibility;
}

void group_tokens(const std::vector<MaskRow>& rows, MaskGroups* groups) {
  groups->groups.clear();
  groups->bits.clear();
  if (rows.empty()) return;
  find_chains(rows, groups);
  join_neighbours(groups);
  for (TokenGroup& group : groups->groups)
    if (group.tree_words > 0) set_bits(rows, &group, groups);
}

}  // namespace tandem
