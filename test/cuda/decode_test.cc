// SPDX-License-Identifier: MIT
// Decode kernels of the CUDA module against double precision.
//
//   decode_test [MODULE [PAIR]]    PAIR: index of the only pair of types, so that several can be tested at once
//
// TANDEM_TEST_FILTER=every_kernel_over_few_keys: for tools that watch every memory access.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "lib/model/dtype.h"
#include "reference/stored_row.h"
#include "window_checks.h"
#include "with_cmocka.h"

namespace {

using tandem::test::OpenDevice;
using tandem::test::TypePair;
using tandem::test::WindowCase;
using tandem::test::WindowOptions;
using tandem::test::WindowSequence;

OpenDevice* device = nullptr;
reference::GateShares shares;

std::span<const TypePair> pairs = tandem::test::kPairs;  // the pairs that this process tests

WindowOptions options_of(TypePair types, int32_t dim, int32_t group, std::vector<WindowSequence> sequences) {
  return tandem::test::options_of(types, 3, dim, group, std::move(sequences));
}

// Checks the outputs of a call.
void assert_left_right(const WindowCase& c, const WindowOptions& options) {
  const reference::GateVerdict verdict = c.check();
  shares.include(verdict.shares);
  if (!verdict.pass) fail_msg("%s: %s", tandem::test::describe(options).c_str(), verdict.message.c_str());
}

void assert_right(const WindowOptions& options) {
  WindowCase c(*device, options);
  tandem::DeviceError error;
  device->must(c.supports(&error), error);
  for (int i = 0; i < 2; ++i) {  // the second call finds the workspace as the first one left it
    c.clear_output();
    c.attend(0);
    assert_left_right(c, options);
  }
}

void types_and_dims(void**) {
  uint64_t seed = 1;
  for (const TypePair types : pairs)
    for (const int32_t dim : {64, 80, 96, 112, 128, 192, 256})
      for (const int32_t group : {1, 4, 8, 16}) {
        WindowOptions options = options_of(types, dim, group, {{0, 333, 1}, {70, 1200, 1}});
        options.q_type = seed % 3 == 0 ? TANDEM_F32 : seed % 3 == 1 ? TANDEM_BF16 : TANDEM_F16;
        options.o_type = seed % 5 == 0 ? TANDEM_BF16 : TANDEM_F32;
        options.seed = seed++;
        assert_right(options);
      }
}

void every_kernel_over_few_keys(void**) {
  constexpr tandem::test::KernelCall kCalls[] = {{1, TANDEM_BF16, 0.0f}, {5, TANDEM_F32, 0.0f}, {16, TANDEM_F16, 5.0f}};
  for (const TypePair types : pairs)
    tandem::test::for_every_kernel(types, {{0, 512, 1}, {70, 333, 1}, {10, 10, 1}, {0, 1, 1}}, kCalls,
                                   [](const WindowOptions& options) {
                                     WindowCase c(*device, options);
                                     c.attend(0);
                                     assert_left_right(c, options);
                                   });
}

void lengths_and_begins(void**) {
  std::vector<WindowSequence> sequences;
  for (const int64_t n : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 5000})
    for (const int64_t begin : {0, 1, 15, 63, 64, 127, 1000}) sequences.push_back({begin, begin + n, 1});
  for (const TypePair types : pairs) assert_right(options_of(types, 128, 4, sequences));
}

// All blocks share the keys of one KV head, so their states are merged in groups.
void one_kv_head(void**) {
  for (const TypePair types : pairs)
    for (const int32_t dim : {64, 128, 256})
      for (const int32_t group : {1, 8, 16})
        for (const int64_t n_keys : {700, 5000, 40000}) {
          const WindowOptions options = tandem::test::options_of(types, 1, dim, group, {{0, n_keys, 1}});
          assert_right(options);
          if (n_keys == 5000) assert_right(tandem::test::options_of(types, 2, dim, group, {{0, n_keys, 1}, {9, 3000, 1}}));
        }
}

void empty_sequences_give_the_empty_state(void**) {
  assert_right(options_of({TANDEM_BF16, TANDEM_BF16}, 128, 4, {{0, 0, 0}, {10, 10, 1}, {0, 100, 1}, {64, 64, 1}}));
}

void sequences_without_keys_read_nothing(void**) {
  for (const TypePair types : pairs)
    for (const int32_t q_len : {1, 4}) {
      WindowOptions options = options_of(types, 128, 4, {{10, 10, q_len}, {0, 300, 1}, {128, 128, 1}});
      options.has_no_page_0 = true;
      assert_right(options);
    }
}

void several_queries(void**) {
  for (const TypePair types : pairs)
    for (const int32_t q_len : {2, 3, 4, 7})
      for (const int32_t group : {1, 4, 5})
        assert_right(options_of(types, 64, group, {{0, 100, q_len}, {30, 200, 1}, {100, 100 + q_len, q_len}, {0, 1, 0}}));
}

void sliding_windows_soft_caps_and_sinks(void**) {
  for (const TypePair types : pairs)
    for (const int64_t window : {1, 16, 100, 700})
      for (const float cap : {0.0f, 5.0f}) {
        WindowOptions options = options_of(types, 96, 4, {{0, 900, 1}, {37, 640, 3}, {0, 5, 2}});
        options.layer.sliding_window = window;
        options.layer.soft_cap = cap;
        for (int32_t i = 0; i < options.layer.n_q_heads; ++i)
          options.layer.sinks.push_back(0.5f * static_cast<float>(i) - 2.0f);
        assert_right(options);
      }
}

void keys_behind_the_window_may_be_nan(void**) {
  for (const TypePair types : pairs)
    for (const int32_t q_len : {1, 3}) {
      WindowOptions options = options_of(types, 128, 4, {{0, 500, q_len}, {3, 333, 1}, {0, 130, 2}});
      options.layer.sliding_window = 100;
      options.hides_old = true;
      assert_right(options);
    }
}

void rows_that_see_nothing(void**) {
  WindowOptions options = options_of({TANDEM_BF16, TANDEM_BF16}, 64, 1, {{40, 60, 30}, {10, 10, 2}, {0, 100, 1}});
  assert_right(options);
  options.layer.sinks = {-INFINITY, 0.5f, -2.0f};
  assert_right(options);
}

void bad_numbers_stay_where_they_are(void**) {
  constexpr int64_t kPlaces[] = {-1, -2, 0, 1, 90};
  for (const TypePair types : pairs) {
    const WindowOptions options = options_of(types, 128, 4, {{0, 333, 1}, {70, 1200, 3}, {0, 5000, 1}});
    const std::string fault = tandem::test::check_bad_numbers(*device, options, kPlaces);
    if (!fault.empty()) fail_msg("%s", fault.c_str());
  }
}

void weights_far_below_the_largest(void**) {
  constexpr int32_t kGroups[] = {1, 4, 8, 16};
  for (const TypePair types : pairs)
    tandem::test::for_far_weights(types, {{0, 40, 1}, {0, 333, 1}, {70, 3000, 1}}, kGroups, assert_right);
}

void pages_of_other_lengths(void**) {
  for (const int32_t page_len : {64, 192, 256}) {
    WindowOptions options = options_of({TANDEM_Q8_0, TANDEM_Q8_0}, 80, 4, {{0, 700, 1}, {100, 1500, 2}});
    options.page_len = page_len;
    assert_right(options);
  }
}

// As a graph is replayed: the launch stays the same, lengths in device memory change.
void lengths_change_between_calls(void**) {
  for (const TypePair types : pairs) {
    WindowCase c(*device, options_of(types, 128, 4, {{0, 3000, 1}, {50, 900, 2}, {0, 5000, 1}}));
    for (const int64_t n_fewer : {0, 1, 130, 800, 1500, 3000}) {
      c.shorten(n_fewer);
      c.clear_output();
      c.attend(0);
      const reference::GateVerdict verdict = c.check();
      if (!verdict.pass) fail_msg("%lld keys fewer: %s", static_cast<long long>(n_fewer), verdict.message.c_str());
    }
  }
}

// Calls of different shapes can use one workspace in turn.
void a_workspace_serves_every_call(void**) {
  WindowCase large(*device, options_of({TANDEM_BF16, TANDEM_BF16}, 64, 4, std::vector<WindowSequence>(60, {0, 700, 1})));
  WindowCase small(*device, options_of({TANDEM_Q4_0, TANDEM_Q4_0}, 128, 8, {{0, 4000, 2}}));
  const int64_t bytes = std::max(large.workspace_bytes(), small.workspace_bytes());
  void* workspace = device->allocate(bytes);
  device->upload(workspace, std::vector<char>(static_cast<size_t>(bytes)).data(), bytes);
  for (int i = 0; i < 3; ++i)
    for (WindowCase* c : {&large, &small}) {
      c->use_workspace(workspace);
      c->clear_output();
      c->attend(0);
      const reference::GateVerdict verdict = c->check();
      if (!verdict.pass) fail_msg("round %d: %s", i, verdict.message.c_str());
    }
  device->table->release(device->self, workspace);
}

// A planned step may launch more sequences than its workspace is for, if the others have no keys. Nothing after the
// workspace changes.
void a_workspace_serves_sequences_without_keys(void**) {
  constexpr int64_t kGuard = 1 << 16;
  for (const TypePair types : pairs) {
    std::vector<WindowSequence> sequences(200, {0, 0, 0});
    sequences[0] = {0, 40000, 1};
    const WindowCase declared(*device, tandem::test::options_of(types, 1, 128, 8, {sequences[0]}));
    WindowCase c(*device, tandem::test::options_of(types, 1, 128, 8, sequences));
    const int64_t bytes = declared.workspace_bytes();
    auto* const workspace = static_cast<std::byte*>(device->allocate(bytes + kGuard));
    device->upload(workspace, std::vector<char>(static_cast<size_t>(bytes)).data(), bytes);
    c.use_workspace(workspace);
    for (int i = 0; i < 2; ++i) {
      c.clear_output();
      c.attend(0);
      const reference::GateVerdict verdict = c.check();
      if (!verdict.pass) fail_msg("call %d: %s", i, verdict.message.c_str());
    }
    std::vector<unsigned char> guard(kGuard);
    device->download(guard.data(), workspace + bytes, kGuard);
    assert_true(std::all_of(guard.begin(), guard.end(), [](unsigned char byte) { return byte == 0xff; }));
    device->table->release(device->self, workspace);
  }
}

// Lists of one head or of all heads, of single tokens and of long units, before a range or without one.
void key_lists(void**) {
  uint64_t seed = 1;
  for (const TypePair types : pairs)
    for (const int32_t dim : {64, 80, 96, 112, 128, 192, 256})
      for (const int32_t group : {1, 4, 8, 16})
        for (const int64_t unit : {1, 8, 50, 256}) {
          if (!tandem::test::has_kernels(types, dim)) continue;
          WindowOptions options = options_of(types, dim, group, {{0, 333, 1}, {70, 2500, 1}, {64, 64, 1}, {0, 1, 1}});
          options.q_type = seed % 3 == 0 ? TANDEM_F32 : seed % 3 == 1 ? TANDEM_BF16 : TANDEM_F16;
          options.lists.n_heads = seed % 4 == 0 ? 1 : 3;
          options.lists.unit = unit;
          options.lists.share = seed % 5 == 0 ? 1.0 : seed % 5 == 1 ? 0.02 : 0.4;
          options.lists.newest = seed % 3 == 0 ? 0 : 200;
          options.has_no_page_0 = seed % 2 == 0;
          options.lists.by_kernels = seed % 7 == 0;
          options.seed = seed++;
          assert_right(options);
        }
}

void key_lists_of_several_queries(void**) {
  uint64_t seed = 1;
  for (const TypePair types : pairs)
    for (const int32_t q_len : {2, 5, 11})
      for (const int64_t window : {0, 100, 700})
        for (const float cap : {0.0f, 5.0f}) {
          WindowOptions options =
              options_of(types, 128, 4, {{0, 900, q_len}, {37, 640, 1}, {10, 10 + q_len, q_len}, {0, 700, 0}});
          options.layer.sliding_window = window;
          options.layer.soft_cap = cap;
          options.layer.sinks.assign(static_cast<size_t>(options.layer.n_q_heads), 0.5f);
          options.lists.n_heads = seed % 3 == 0 ? 1 : 3;
          options.lists.sliding_window = seed % 2 == 0 ? 150 : 0;
          options.lists.unit = seed % 4 == 0 ? 1 : 16;
          options.lists.newest = 2 * q_len;
          options.seed = seed++;
          assert_right(options);
        }
}

// Lists that contain the whole range give the same bits as no lists.
void lists_of_ranges_are_bit_equal(void**) {
  for (const TypePair types : pairs)
    for (const int32_t n_heads : {1, 3}) {
      WindowOptions options = options_of(types, 128, 4, {{0, 333, 1}, {70, 9000, 1}, {10, 200, 3}});
      WindowCase dense(*device, options);
      dense.clear_output();
      dense.attend(0);
      options.lists.n_heads = n_heads;
      options.lists.share = 0.0;
      options.lists.newest = 20'000;
      WindowCase listed(*device, options);
      listed.clear_output();
      listed.attend(0);
      // `newest` is more than any sequence has, so each range begins where its sequence begins.
      assert_true(dense.output() == listed.output());
    }
}

// As a graph is replayed: the launch stays the same, lists in device memory change.
void lists_change_between_calls(void**) {
  for (const TypePair types : pairs) {
    WindowOptions options = options_of(types, 128, 4, {{0, 3000, 1}, {50, 900, 2}, {0, 5000, 1}});
    options.lists.n_heads = 3;
    options.lists.share = 0.2;
    options.lists.unit = 4;
    options.lists.newest = 100;
    options.lists.hides_others = false;
    WindowCase c(*device, options);
    for (const uint64_t seed : {11, 12, 13, 14}) {
      c.name_others(seed);
      c.clear_output();
      c.attend(0);
      assert_left_right(c, options);
    }
  }
}

void sizes_of_queries(void**) {
  for (const TypePair types : pairs)
    for (const double size : {1e-10, 1e-3, 10.0, 3000.0}) {
      // Logits in the thousands are no more exact than 1e-4 in f32. So weights are inexact if the heaviest values are codes
      // of 0.
      if (size > 1000.0 && types.k != TANDEM_F16 && types.k != TANDEM_BF16) continue;
      WindowOptions options = options_of(types, 128, 4, {{0, 1000, 1}});
      options.q_size = size;
      options.q_type = TANDEM_F32;
      assert_right(options);
    }
}

void long_diffuse_attention(void**) {
  for (const TypePair types : pairs) {
    WindowOptions options = options_of(types, 128, 4, {{0, 40000, 1}});
    options.q_size = 0.01;
    options.v_mean = 0.5;
    assert_right(options);
  }
}

// Peaked and flat weights over groups with scales from those of common numbers down to subnormal f16 and 0. Large scales
// occur only in sequences of one key, whose logit is 0. There the plain computation is exact, so the output must be, too.
void scales_of_all_sizes(void**) {
  for (const TypePair types : pairs) {
    if (!reference::has_groups(types.v)) continue;
    for (const int32_t dim : {112, 128}) {
      for (const int32_t least : {0, -6, -24})
        for (const double q_size : {0.01, 1.0}) {
          WindowOptions options = options_of(
              types, dim, 4, {{0, 2, 1}, {0, 3, 1}, {0, 5, 2}, {0, 16, 1}, {3, 36, 1}, {5, 700, 1}, {0, 6000, 1}});
          options.q_size = q_size;
          options.v_least = least;
          options.mass_epsilon = 0x1p-20;
          assert_right(options);
        }
      WindowOptions options = options_of(types, dim, 4, std::vector<WindowSequence>(20, {0, 1, 1}));
      options.q_size = 0.0;
      options.v_most = 15;
      assert_right(options);
    }
  }
}

void repeats_are_bit_equal(void**) {
  for (const TypePair types : pairs) {
    WindowCase c(*device, options_of(types, 128, 4, {{0, 3000, 1}, {64, 5000, 2}, {5, 17, 1}}));
    c.attend(0);
    assert_true(c.check().pass);
    const std::vector<uint8_t> first = c.output();
    for (int i = 0; i < 250; ++i) {
      c.clear_output();
      c.attend(0);
      assert_true(c.output() == first);
    }
  }
}

// Items so long that their blocks take turns, then shorter ones that are cut into parts.
template <class Check>
void attend_long_items(Check check) {
  for (const TypePair types : pairs) {
    if (types.k != TANDEM_BF16 && types.k != TANDEM_E4M3 && types.k != TANDEM_Q4_0) continue;
    WindowOptions options = options_of(types, 128, 4, {{0, 40001, 1}, {77, 30142, 2}});
    options.layer.n_kv_heads = 8;
    options.layer.n_q_heads = 32;
    options.n_distinct = 1000;
    WindowCase c(*device, options);
    for (const int64_t n_fewer : {0, 150, 25000}) {
      c.shorten(n_fewer);
      c.clear_output();
      c.attend(0);
      check(c, n_fewer);
    }
  }
}

void long_items_go_round(void**) {
  attend_long_items([](const WindowCase& c, int64_t n_fewer) {
    const reference::GateVerdict verdict = c.check();
    if (!verdict.pass) fail_msg("%lld keys fewer: %s", static_cast<long long>(n_fewer), verdict.message.c_str());
  });
}

void repeats_of_long_items_are_bit_equal(void**) {
  attend_long_items([](WindowCase& c, int64_t) {
    const std::vector<uint8_t> first = c.output();
    for (int i = 0; i < 50; ++i) {
      c.clear_output();
      c.attend(0);
      assert_true(c.output() == first);
    }
  });
}

void what_has_no_kernel_is_refused(void**) {
  const auto refused = [](const WindowOptions& options, const char* field) {
    tandem::DeviceError error;
    WindowCase c(*device, options);
    assert_int_equal(c.supports(&error), TANDEM_ERROR_UNSUPPORTED);
    assert_string_equal(error.field, field);
  };
  refused(options_of({TANDEM_F16, TANDEM_BF16}, 128, 4, {{0, 100, 1}}), "k_type");
  refused(options_of({TANDEM_F32, TANDEM_BF16}, 80, 4, {{0, 100, 1}}), "k_type");
  refused(options_of({TANDEM_F16, TANDEM_BF16}, 128, 4, {{0, 100, 17}}), "k_type");
  WindowOptions narrow = options_of({TANDEM_BF16, TANDEM_BF16}, 192, 4, {{0, 100, 1}});
  narrow.layer.v_head_dim = 128;
  refused(narrow, "v_head_dim");
}

}  // namespace

int main(int argc, char** argv) {
  OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  pairs = tandem::test::pairs_of(argc, argv);
  const CMUnitTest tests[] = {
      cmocka_unit_test(types_and_dims),
      cmocka_unit_test(every_kernel_over_few_keys),
      cmocka_unit_test(lengths_and_begins),
      cmocka_unit_test(one_kv_head),
      cmocka_unit_test(empty_sequences_give_the_empty_state),
      cmocka_unit_test(sequences_without_keys_read_nothing),
      cmocka_unit_test(several_queries),
      cmocka_unit_test(sliding_windows_soft_caps_and_sinks),
      cmocka_unit_test(keys_behind_the_window_may_be_nan),
      cmocka_unit_test(rows_that_see_nothing),
      cmocka_unit_test(bad_numbers_stay_where_they_are),
      cmocka_unit_test(weights_far_below_the_largest),
      cmocka_unit_test(pages_of_other_lengths),
      cmocka_unit_test(lengths_change_between_calls),
      cmocka_unit_test(a_workspace_serves_every_call),
      cmocka_unit_test(a_workspace_serves_sequences_without_keys),
      cmocka_unit_test(key_lists),
      cmocka_unit_test(key_lists_of_several_queries),
      cmocka_unit_test(lists_of_ranges_are_bit_equal),
      cmocka_unit_test(lists_change_between_calls),
      cmocka_unit_test(sizes_of_queries),
      cmocka_unit_test(long_diffuse_attention),
      cmocka_unit_test(scales_of_all_sizes),
      cmocka_unit_test(repeats_are_bit_equal),
      cmocka_unit_test(long_items_go_round),
      cmocka_unit_test(repeats_of_long_items_are_bit_equal),
      cmocka_unit_test(what_has_no_kernel_is_refused),
  };
  const int n_failed = cmocka_run_group_tests(tests, nullptr, nullptr);
  std::printf("shares of the bounds used: naive %.3f, eps mass %.3f, lse %.3f\n", shares.naive, shares.mass, shares.lse);
  return n_failed;
}
