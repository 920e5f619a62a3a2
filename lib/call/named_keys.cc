// SPDX-License-Identifier: MIT
#include "lib/call/named_keys.h"

namespace tandem {
namespace {

Status refuse(const NamedKeys& as_given, int64_t token, int32_t head, int64_t place, const char* why, int64_t own) {
  const std::span<const int32_t> row = as_given.row(token, head);
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, "selection.idx",
              "selection.idx[%lld, %d, %lld] = %d %s (units of %d tokens; the query is token %lld of its sequence)",
              static_cast<long long>(token), head, static_cast<long long>(place), row[static_cast<size_t>(place)], why,
              1 << as_given.unit_shift, static_cast<long long>(own));
}

// Returns the last place where the caller's row has this value.
int64_t place_of(std::span<const int32_t> row, int32_t value) {
  const auto found = std::find(row.rbegin(), row.rend(), value);
  return std::distance(found, row.rend()) - 1;
}

const char* reason_of(std::span<const int32_t> row, int64_t place, int32_t unit_shift, int64_t own) {
  const int32_t unit = row[static_cast<size_t>(place)], before = place > 0 ? row[static_cast<size_t>(place - 1)] : -2;
  if (unit < 0 || int64_t{unit} << unit_shift > own) return "names no token up to the query's own";
  if (before == -1) return "stands behind a pad of -1";
  if (unit == before) return "stands there twice";
  return "is less than the index before it: without TANDEM_SELECTION_ANY_ORDER indices ascend";
}

Status check_row(const NamedKeys& named, const NamedKeys& as_given, int64_t token, int32_t head, int64_t own) {
  const std::span<const int32_t> row = named.row(token, head);
  const int64_t wrong = first_wrong(row, named.unit_shift, own);
  if (wrong < 0) return {};
  const int64_t place = named.any_order ? place_of(as_given.row(token, head), row[static_cast<size_t>(wrong)]) : wrong;
  return refuse(as_given, token, head, place, reason_of(row, wrong, named.unit_shift, own), own);
}

}  // namespace

int64_t first_wrong(std::span<const int32_t> row, int32_t unit_shift, int64_t own) {
  int32_t before = -2;
  for (size_t i = 0; i < row.size(); ++i) {
    const int32_t unit = row[i];
    const bool is_right = unit == -1 || (unit >= 0 && unit > before && before != -1 && int64_t{unit} << unit_shift <= own);
    if (!is_right) return static_cast<int64_t>(i);
    before = unit;
  }
  return -1;
}

void copy_named(int64_t n_tokens, NamedKeys* named, std::vector<int32_t>* copy) {
  const NamedKeys given = *named;
  copy->resize(static_cast<size_t>(n_tokens * given.n_heads * given.n_idx));
  int32_t* to = copy->data();
  for (int64_t token = 0; token < n_tokens; ++token)
    for (int32_t head = 0; head < given.n_heads; ++head, to += given.n_idx) {
      const std::span<const int32_t> row = given.row(token, head);
      std::copy(row.begin(), row.end(), to);
      if (!given.any_order) continue;
      // A pad sorts after every index.
      std::sort(to, to + given.n_idx, [](int32_t a, int32_t b) {
        const auto order = [](int32_t x) { return x == -1 ? INT64_MAX : int64_t{x}; };
        return order(a) < order(b);
      });
    }
  named->idx = copy->data();
  named->head_stride = given.n_idx;
  named->token_stride = given.n_heads * given.n_idx;
}

Status check_named(const NamedKeys& named, const NamedKeys& as_given, int64_t token, int64_t n, int64_t own_of_first) {
  for (int64_t t = 0; t < n; ++t)
    for (int32_t head = 0; head < named.n_heads; ++head)
      TANDEM_TRY(check_row(named, as_given, token + t, head, own_of_first + t));
  return {};
}

void NotedKeys::note(const QueryNames& names, int64_t query, const SeenTokens& seen, int32_t tree_words, bool is_checked) {
  seen_ = seen;
  if (tree_words > 0) {
    tree_.assign(seen.tree_bits, seen.tree_bits + tree_words);
    seen_.tree_bits = tree_.data();
  }
  is_checked_ = is_checked;
  if (names.version != 0 && names.version == version_) return;
  clear();
  newest_begins_.clear();
  int64_t n_idx = names.keys.n_idx;
  for (int32_t head = 0; head < names.keys.n_heads && names.rows != nullptr; ++head) {
    n_idx = std::max(n_idx, std::ssize(names.row(query, head)));
    newest_begins_.push_back(names.newest_begin(query, head, 0));
  }
  idx_.assign(static_cast<size_t>(names.keys.n_heads * n_idx), -1);
  for (int32_t head = 0; head < names.keys.n_heads; ++head) {
    const std::span<const int32_t> row = names.row(query, head);
    std::copy(row.begin(), row.end(), idx_.begin() + head * n_idx);
  }
  keys_ = names.keys;
  keys_.n_idx = n_idx;
  keys_.idx = idx_.data();
  keys_.head_stride = keys_.n_idx;
  version_ = names.version;
}

}  // namespace tandem
