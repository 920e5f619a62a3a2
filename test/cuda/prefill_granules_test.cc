// SPDX-License-Identifier: MIT
// Key lists with granules in prefill kernels: more query rows of a sequence than decode kernels take. All rows of a KV head
// attend the list's keys. The outputs are compared with double precision, as in prefill_test.cc. Keys that no list names are
// NaN.
//
//   prefill_granules_test [MODULE]
//
// TANDEM_TEST_FILTER=granules_over_few_keys: for tools that watch every memory access.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "window_checks.h"
#include "with_cmocka.h"

namespace {

using tandem::test::OpenDevice;
using tandem::test::options_of;
using tandem::test::TypePair;
using tandem::test::WindowCase;
using tandem::test::WindowOptions;
using tandem::test::WindowSequence;

constexpr TypePair kTypes[] = {{TANDEM_F16, TANDEM_F16}, {TANDEM_BF16, TANDEM_BF16}};

OpenDevice* device = nullptr;
reference::GateShares shares;

WindowOptions listed(TypePair types, int32_t n_kv_heads, int32_t dim, int32_t group, std::vector<WindowSequence> sequences,
                     const tandem::test::ListOptions& lists) {
  WindowOptions options = options_of(types, n_kv_heads, dim, group, std::move(sequences));
  options.q_type = types.k;
  options.lists = lists;
  return options;
}

void assert_left_right(const WindowCase& c, const WindowOptions& options) {
  const reference::GateVerdict verdict = c.check();
  shares.include(verdict.shares);
  if (!verdict.pass)
    fail_msg("%s, seed %d: %s", tandem::test::describe(options).c_str(), static_cast<int>(options.seed),
             verdict.message.c_str());
}

// The second call finds the workspace as the first one left it.
void assert_right_twice(const WindowOptions& options) {
  WindowCase c(*device, options);
  c.clear_output();
  c.attend(0);
  assert_left_right(c, options);
  const std::vector<uint8_t> first = c.output();
  c.clear_output();
  c.attend(0);
  assert_true(c.output() == first);
}

// Lists of one head or of all heads, of single tokens and of long units, before a range or without one, some of them empty.
void types_and_dims(void**) {
  constexpr int32_t kGroups[] = {1, 2, 3, 4, 5, 7, 8, 16};
  constexpr double kShares[] = {0.02, 0.2, 0.5, 1.0, 0.002};
  uint64_t seed = 1;
  for (const TypePair types : kTypes)
    for (const int32_t dim : {64, 80, 96, 112, 128, 192, 256})
      for (const int64_t unit : {1, 3, 8, 50, 256}) {
        WindowOptions options = listed(types, 3, dim, kGroups[seed % 8],
                                       {{0, 333, 90}, {70, 2500, 64}, {64, 64, 3}, {0, 700, 0}, {0, 5, 2}, {128, 1000, 1}},
                                       {.n_heads = seed % 4 == 0 ? 1 : 3, .unit = unit, .share = kShares[seed % 5]});
        options.lists.newest = seed % 3 == 0 ? 0 : 200;
        options.lists.by_kernels = seed % 7 == 0;
        options.has_no_page_0 = seed % 2 == 0;
        options.o_type = seed % 5 == 0 ? types.k : TANDEM_F32;
        options.seed = seed++;
        assert_right_twice(options);
      }
}

void granules_over_few_keys(void**) {
  uint64_t seed = 1;
  for (const TypePair types : kTypes)
    for (const int32_t dim : {64, 80, 96, 112, 128, 192, 256}) {
      WindowOptions options = listed(types, 2, dim, 4, {{0, 512, 70}, {70, 333, 21}, {10, 10, 3}},
                                     {.n_heads = 2, .unit = seed % 2 == 0 ? 1 : 8, .share = 0.5, .newest = 50});
      options.layer.sliding_window = seed % 3 == 0 ? 100 : 0;
      options.seed = seed++;
      WindowCase c(*device, options);
      c.clear_output();
      c.attend(0);
      assert_left_right(c, options);
    }
}

// Granules after a query's own token, and granules too old for sliding windows, of the layer and of each list.
void causality_and_sliding_windows(void**) {
  uint64_t seed = 1;
  for (const TypePair types : kTypes)
    for (const int32_t dim : {64, 128, 256})
      for (const int64_t window : {0, 1, 16, 100, 700})
        for (const int64_t unit : {1, 16, 64}) {
          WindowOptions options = listed(types, 2, dim, seed % 3 == 0 ? 5 : 4, {{0, 900, 70}, {37, 540, 300}, {0, 150, 150}},
                                         {.n_heads = seed % 5 == 0 ? 1 : 2, .unit = unit, .share = 0.6, .newest = 20});
          options.layer.sliding_window = window;
          options.lists.sliding_window = seed % 2 == 0 ? 150 : 0;
          for (int32_t i = 0; i < options.layer.n_q_heads && seed % 3 != 1; ++i)
            options.layer.sinks.push_back(0.5f * static_cast<float>(i) - 2.0f);
          options.seed = seed++;
          assert_right_twice(options);
        }
}

// Few items, whose keys are shared out in clusters and among several clusters; lists that need only one cluster; more items
// than blocks run at once.
void splits_and_clusters(void**) {
  uint64_t seed = 1;
  for (const TypePair types : kTypes)
    for (const int32_t dim : {64, 256})
      for (const int32_t kv_heads : {1, 8})
        for (const double share : {0.05, 1.0}) {
          WindowOptions options = listed(types, kv_heads, dim, 4, {{0, kv_heads == 1 ? 6000 : 1500, 64}},
                                         {.n_heads = kv_heads, .unit = 8, .share = share, .newest = 1000});
          if (seed % 3 == 0) options.layer.sinks.assign(static_cast<size_t>(options.layer.n_q_heads), 0.5f);
          if (seed % 2 == 0) options.sequences = {{0, 1500, 64}, {0, 300, 20}, {500, 1700, 33}};
          options.seed = seed++;
          assert_right_twice(options);
        }
  std::vector<WindowSequence> many;
  for (int32_t i = 0; i < 20; ++i) many.push_back({0, 600 + 16 * i, 16});
  assert_right_twice(listed(kTypes[1], 4, 128, 4, many, {.n_heads = 4, .unit = 8, .share = 0.2, .newest = 200}));
}

void pages_of_other_lengths(void**) {
  for (const TypePair types : kTypes)
    for (const int32_t page_len : {64, 192, 256}) {
      WindowOptions options =
          listed(types, 2, 128, 4, {{0, 700, 40}, {100, 1500, 64}}, {.n_heads = 2, .unit = 8, .share = 0.3, .newest = 100});
      options.page_len = page_len;
      assert_right_twice(options);
    }
}

// As a graph is replayed: the launch stays the same, lists in device memory change.
void lists_change_between_calls(void**) {
  for (const TypePair types : kTypes) {
    WindowOptions options = listed(types, 3, 128, 4, {{0, 3000, 64}, {50, 900, 20}, {0, 5000, 33}},
                                   {.n_heads = 3, .unit = 4, .share = 0.2, .newest = 100, .hides_others = false});
    WindowCase c(*device, options);
    for (const uint64_t seed : {11, 12, 13, 14}) {
      c.name_others(seed);
      c.clear_output();
      c.attend(0);
      assert_left_right(c, options);
    }
  }
}

void repeats_are_bit_equal(void**) {
  for (const TypePair types : kTypes)
    for (const int64_t unit : {1, 8}) {
      const WindowOptions options = listed(types, 2, 128, 4, {{0, 3000, 64}, {64, 1000, 20}, {5, 170, 100}},
                                           {.n_heads = 2, .unit = unit, .share = 0.4, .newest = 100});
      WindowCase c(*device, options);
      c.clear_output();
      c.attend(0);
      assert_left_right(c, options);
      const std::vector<uint8_t> first = c.output();
      for (int i = 0; i < 250; ++i) {
        c.clear_output();
        c.attend(0);
        assert_true(c.output() == first);
      }
    }
}

// Rows of a wrong list are NaN, the other rows are as before.
void wrong_lists_are_nan(void**) {
  constexpr int32_t kHeads = 3, kGroup = 4, kDim = 128;
  for (const TypePair types : kTypes)
    for (const int64_t n_keys : {500, 9000})
      for (const bool has_sinks : {false, true}) {
        WindowOptions options = listed(types, kHeads, kDim, kGroup, {{0, n_keys, 64}, {0, 300, 30}},
                                       {.n_heads = kHeads, .unit = 8, .share = 0.4, .newest = 100});
        if (has_sinks) options.layer.sinks.assign(kHeads * kGroup, 0.5f);
        WindowCase c(*device, options);
        c.clear_output();
        c.attend(0);
        assert_left_right(c, options);
        const std::vector<uint8_t> right = c.output();
        std::vector<tandem::DeviceKeys> keys = c.named().keys();
        keys[1].n = -1;  // the first sequence's list
        device->upload(const_cast<tandem::DeviceKeys*>(c.lists().keys), keys.data(),
                       static_cast<int64_t>(keys.size() * sizeof keys[0]));
        c.clear_output();
        c.attend(0);
        const std::vector<uint8_t> bytes = c.output();
        const auto *o = reinterpret_cast<const float*>(bytes.data()), *was = reinterpret_cast<const float*>(right.data());
        constexpr int64_t kRowHeads = kHeads * kGroup, kRows = (64 + 30) * kRowHeads;
        for (int64_t row = 0; row < kRows; ++row) {
          const bool is_wrong = row < 64 * kRowHeads && row % kRowHeads / kGroup == 1;
          for (int64_t i = 0; i <= kDim; ++i) {
            const int64_t at = i < kDim ? row * kDim + i : kRows * kDim + row;  // lse comes after o
            if (is_wrong ? !std::isnan(o[at]) : o[at] != was[at])
              fail_msg("row %d, number %d: %f, was %f", static_cast<int>(row), static_cast<int>(i),
                       static_cast<double>(o[at]), static_cast<double>(was[at]));
          }
        }
      }
}

// Without a prefill kernel that takes granules, 64 rows are the limit.
void refusals(void**) {
  struct {
    int32_t k_type, q_type;
    float soft_cap;
    bool is_served;
  } const kCases[] = {{TANDEM_BF16, TANDEM_BF16, 0.0f, true},  {TANDEM_F16, TANDEM_F16, 0.0f, true},
                      {TANDEM_BF16, TANDEM_F16, 0.0f, false},  {TANDEM_BF16, TANDEM_F32, 0.0f, false},
                      {TANDEM_BF16, TANDEM_BF16, 5.0f, false}, {TANDEM_Q8_0, TANDEM_BF16, 0.0f, false},
                      {TANDEM_F32, TANDEM_F32, 0.0f, false}};
  for (const auto& of : kCases)
    for (const int32_t q_len : {16, 17}) {
      WindowOptions options = listed({of.k_type, of.k_type}, 2, 128, 4, {{0, 333, q_len}}, {.n_heads = 2});
      options.q_type = of.q_type;
      options.layer.soft_cap = of.soft_cap;
      WindowCase c(*device, options);
      const int32_t most = device->table->most_list_rows(device->self, c.call().layer, &c.call().q);
      assert_int_equal(most, of.is_served ? INT32_MAX : 64);
      tandem::DeviceError error;
      const bool is_refused = !of.is_served && q_len == 17;
      assert_int_equal(c.try_attend(&error), is_refused ? TANDEM_ERROR_UNSUPPORTED : TANDEM_OK);
      if (is_refused) assert_string_equal(error.field, "lists");
      if (!is_refused) assert_left_right(c, options);
    }
  WindowOptions options = listed(kTypes[1], 2, 128, 4, {{0, 333, 40}}, {.n_heads = 2});
  WindowCase c(*device, options);
  c.call().q.head_stride += 4;  // rows are not aligned to 16 bytes
  assert_int_equal(device->table->most_list_rows(device->self, c.call().layer, &c.call().q), 64);
  c.call().q.head_stride -= 4;
  c.call().before_o = c.call().before_lse = c.call().lse;
  tandem::DeviceError error;
  assert_int_equal(c.try_attend(&error), TANDEM_ERROR_UNSUPPORTED);
  assert_string_equal(error.field, "lists");
}

}  // namespace

int main(int argc, char** argv) {
  OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  const CMUnitTest tests[] = {
      cmocka_unit_test(types_and_dims),
      cmocka_unit_test(granules_over_few_keys),
      cmocka_unit_test(causality_and_sliding_windows),
      cmocka_unit_test(splits_and_clusters),
      cmocka_unit_test(pages_of_other_lengths),
      cmocka_unit_test(lists_change_between_calls),
      cmocka_unit_test(repeats_are_bit_equal),
      cmocka_unit_test(wrong_lists_are_nan),
      cmocka_unit_test(refusals),
  };
  const int n_failed = cmocka_run_group_tests(tests, nullptr, nullptr);
  std::printf("shares of the bounds used: naive %.3f, eps mass %.3f, lse %.3f\n", shares.naive, shares.mass, shares.lse);
  return n_failed;
}
