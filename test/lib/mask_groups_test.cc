// SPDX-License-Identifier: MIT
// Conversion of masks to groups of tokens. Every token sees what its row of the mask shows, and common masks need as few
// jobs as possible.
#include "lib/tensors/mask_groups.h"

#include <cmath>
#include <limits>
#include <vector>

#include "reference/random.h"
#include "with_cmocka.h"

namespace tandem {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

struct Scanned {
  std::vector<std::vector<KeyRange>> ranges;
  MaskGroups groups;
  bool has_values = false;
};

// Returns mask(t, j) as n_tokens rows of n_keys columns.
template <class Mask>
Scanned scan(int64_t n_tokens, int64_t n_keys, const Mask& mask) {
  Scanned scanned;
  std::vector<MaskRow> rows;
  scanned.ranges.resize(static_cast<size_t>(n_tokens));
  for (int64_t t = 0; t < n_tokens; ++t) {
    std::vector<float> row(static_cast<size_t>(n_keys));
    for (int64_t j = 0; j < n_keys; ++j) row[static_cast<size_t>(j)] = mask(t, j);
    auto& ranges = scanned.ranges[static_cast<size_t>(t)];
    scanned.has_values = scan_mask_row(TANDEM_F32, row.data(), n_keys, &ranges) || scanned.has_values;
    rows.push_back({ranges.data(), static_cast<int64_t>(ranges.size())});
  }
  group_tokens(rows, &scanned.groups);
  return scanned;
}

// Reads a Visibility as the kernels do.
bool sees(const MaskGroups& groups, const TokenGroup& group, int64_t t, int64_t key) {
  bool is_key = false;
  for (const KeyRange& range : group.keys) is_key = is_key || (key >= range.begin && key < range.end);
  const Visibility visibility = groups.visibility_of(group);
  const int64_t own = t - group.first, bit = key - visibility.tree_begin;
  if (!is_key || key < visibility.begin[own] || key >= visibility.end[own]) return false;
  if (bit < 0) return true;
  return bit < 64 * int64_t{visibility.tree_words} &&
         (visibility.tree_bits[own * visibility.tree_words + bit / 64] >> (bit % 64) & 1) != 0;
}

template <class Mask>
void expect_same(const Scanned& scanned, int64_t n_tokens, int64_t n_keys, const Mask& mask) {
  int64_t t = 0;
  for (const TokenGroup& group : scanned.groups.groups) {
    assert_int_equal(group.first, t);
    const Visibility visibility = scanned.groups.visibility_of(group);
    int64_t n = 0;
    for (const KeyRange& range : group.keys) n += range.end - range.begin;
    assert_int_equal(n, group.n_keys);
    for (; t < group.end; ++t) {
      if (t > group.first) {  // the kernels rely on this
        assert_true(visibility.begin[t - group.first] >= visibility.begin[t - group.first - 1]);
        assert_true(visibility.end[t - group.first] >= visibility.end[t - group.first - 1]);
      }
      for (int64_t j = 0; j < n_keys; ++j) assert_int_equal(sees(scanned.groups, group, t, j), mask(t, j) != kHidden);
    }
  }
  assert_int_equal(t, n_tokens);
}

template <class Mask>
Scanned check(int64_t n_tokens, int64_t n_keys, const Mask& mask) {
  Scanned scanned = scan(n_tokens, n_keys, mask);
  expect_same(scanned, n_tokens, n_keys, mask);
  return scanned;
}

void test_common_masks(void**) {
  const auto causal = [](int64_t t, int64_t j) { return j <= 100 + t ? 0.0f : kHidden; };
  Scanned scanned = check(70, 256, causal);
  assert_int_equal(scanned.groups.groups.size(), 1);
  assert_int_equal(scanned.groups.groups[0].tree_words, 0);

  const auto sliding = [](int64_t t, int64_t j) { return j <= 100 + t && j > 40 + t ? 0.0f : kHidden; };
  scanned = check(70, 256, sliding);
  assert_int_equal(scanned.groups.groups.size(), 1);
  assert_int_equal(scanned.groups.groups[0].n_keys, 129);

  const auto holes = [](int64_t t, int64_t j) { return j <= 100 + t && j % 7 != 3 ? 0.0f : kHidden; };
  scanned = check(70, 256, holes);
  assert_int_equal(scanned.groups.groups.size(), 1);
  assert_int_equal(scanned.groups.groups[0].tree_words, 0);

  // Eight sequences whose cells follow each other, with one token each.
  const auto batch = [](int64_t t, int64_t j) { return j / 32 == t ? 0.0f : kHidden; };
  assert_int_equal(check(8, 256, batch).groups.groups.size(), 8);

  // Branches of a tree after a common beginning.
  const auto tree = [](int64_t t, int64_t j) { return j < 200 || (j < 216 && (j - 200) % 4 == t % 4) ? 0.0f : kHidden; };
  scanned = check(16, 256, tree);
  assert_int_equal(scanned.groups.groups.size(), 1);
  assert_int_equal(scanned.groups.groups[0].tree_begin, 200);
}

void test_values(void**) {
  assert_false(scan(2, 100, [](int64_t, int64_t j) { return j < 50 ? -0.0f : kHidden; }).has_values);
  assert_true(scan(2, 100, [](int64_t, int64_t j) { return j == 77 ? 0.5f : 0.0f; }).has_values);
  assert_true(scan(2, 100, [](int64_t, int64_t j) { return j == 77 ? std::nanf("") : 0.0f; }).has_values);
}

void test_random_masks(void**) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    reference::Random random(seed);
    const int64_t n_tokens = random.integer(1, 20), n_keys = random.integer(1, 200), kind = random.integer(0, 3);
    std::vector<float> values(static_cast<size_t>(n_tokens * n_keys));
    for (int64_t t = 0; t < n_tokens; ++t) {
      const int64_t begin = random.integer(0, n_keys), end = random.integer(begin, n_keys);
      for (int64_t j = 0; j < n_keys; ++j) {
        const bool shown = kind == 0   ? random.chance(0.5)
                           : kind == 1 ? j >= begin && j < end
                           : kind == 2 ? j < n_keys - n_tokens || random.chance(0.5)
                                       : j <= t * 9 && !(t % 5 == 4);
        values[static_cast<size_t>(t * n_keys + j)] = shown ? 0.0f : kHidden;
      }
    }
    check(n_tokens, n_keys, [&](int64_t t, int64_t j) { return values[static_cast<size_t>(t * n_keys + j)]; });
  }
}

}  // namespace
}  // namespace tandem

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(tandem::test_common_masks),
      cmocka_unit_test(tandem::test_values),
      cmocka_unit_test(tandem::test_random_masks),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
