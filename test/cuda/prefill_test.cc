// SPDX-License-Identifier: MIT
// Prefill kernels of the CUDA module against double precision. The bounds are those of decode, except that the plain
// computation rounds its weights where the kernels may (reference/gate.h).
//
//   prefill_test [MODULE [PAIR]]    PAIR: index of the only pair of types, so that several can be tested at once
//
// TANDEM_TEST_FILTER=every_kernel_over_few_keys, or tiles_over_few_keys: for tools that watch every memory access.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "lib/model/dtype.h"
#include "window_checks.h"
#include "with_cmocka.h"

namespace {

using tandem::test::OpenDevice;
using tandem::test::TypePair;
using tandem::test::WindowCase;
using tandem::test::WindowOptions;
using tandem::test::WindowSequence;

OpenDevice* device = nullptr;
reference::GateShares exact, rounded;  // of calls that must not round weights, and of calls that may

std::span<const TypePair> pairs = tandem::test::kPairs;  // the pairs that this process tests

WindowOptions options_of(TypePair types, int32_t dim, int32_t group, std::vector<WindowSequence> sequences) {
  return tandem::test::options_of(types, 2, dim, group, std::move(sequences));
}

// Checks the outputs of a call.
void assert_left_right(const WindowCase& c, const WindowOptions& options) {
  const reference::GateVerdict verdict = c.check();
  const bool may_round = options.q_type != TANDEM_F32 && options.layer.v_type != TANDEM_F32;
  (may_round ? rounded : exact).include(verdict.shares);
  if (!verdict.pass) fail_msg("%s: %s", tandem::test::describe(options).c_str(), verdict.message.c_str());
}

void assert_right(WindowCase& c, const WindowOptions& options) {
  c.clear_output();
  c.attend(0);
  assert_left_right(c, options);
}

// The second call finds the workspace as the first one left it.
void assert_right_twice(const WindowOptions& options) {
  WindowCase c(*device, options);
  tandem::DeviceError error;
  device->must(c.supports(&error), error);
  assert_right(c, options);
  const std::vector<uint8_t> first = c.output();
  c.clear_output();
  c.attend(0);
  assert_true(c.output() == first);
}

void types_and_dims(void**) {
  constexpr int kCases = 21;  // for each pair
  uint64_t seed = 1 + kCases * static_cast<uint64_t>(pairs.data() - tandem::test::kPairs);
  for (const TypePair types : pairs)
    for (const int32_t dim : {64, 80, 96, 112, 128, 192, 256})
      for (const int32_t q_type : {TANDEM_BF16, TANDEM_F16, TANDEM_F32}) {
        const int32_t group = seed % 3 == 0 ? 1 : seed % 3 == 1 ? 4 : 8;
        WindowOptions options = options_of(types, dim, group, {{0, 333, 90}, {70, 1200, 21}});
        options.q_type = q_type;
        options.o_type = seed % 5 == 0 ? TANDEM_BF16 : TANDEM_F32;
        options.seed = seed++;
        assert_right_twice(options);
      }
}

void every_kernel_over_few_keys(void**) {
  constexpr tandem::test::KernelCall kCalls[] = {
      {4, TANDEM_BF16, 0.0f}, {4, TANDEM_F16, 0.0f}, {4, TANDEM_BF16, 5.0f}, {4, TANDEM_F32, 0.0f}};
  for (const TypePair types : pairs)
    tandem::test::for_every_kernel(types, {{0, 512, 70}, {70, 333, 21}, {10, 10, 3}}, kCalls,
                                   [](const WindowOptions& options) {
                                     WindowCase c(*device, options);
                                     assert_right(c, options);
                                   });
}

// Few rows, and more than one tile of them. Alone, their keys are split among blocks that merge, within clusters and between
// them. Also together with sequences of one query, and over fewer keys than there are blocks.
void few_rows(void**) {
  uint64_t seed = 1;
  for (const TypePair types : pairs)
    for (const int32_t dim : {64, 80, 96, 112, 128, 192, 256})
      for (const int32_t n_rows : {20, 64, 65, 129})
        for (const int64_t n_keys : {129, 300, dim == 128 ? 9000 : 1000}) {
          const int32_t group = seed % 3 == 0 ? 1 : seed % 3 == 1 ? 4 : 8, q_len = (n_rows + group - 1) / group;
          WindowOptions options =
              tandem::test::options_of(types, seed % 4 == 0 ? 8 : 1, dim, group, {{seed % 2 == 0 ? 0 : 77, n_keys, q_len}});
          if (seed % 5 == 0) options.sequences.push_back({0, 700, 1});
          options.q_type = types.k == TANDEM_F16 ? TANDEM_F16 : TANDEM_BF16;
          options.layer.sliding_window = seed % 7 == 0 ? 200 : 0;
          if (seed % 3 == 0) options.layer.sinks.assign(static_cast<size_t>(options.layer.n_q_heads), 0.5f);
          options.o_type = seed % 4 == 0 ? TANDEM_BF16 : TANDEM_F32;
          options.seed = seed++;
          if (tandem::test::has_kernels(types, dim)) assert_right_twice(options);
        }
}

// So many items that nothing is split, and lengths around the borders of tiles.
void lengths_and_begins(void**) {
  std::vector<WindowSequence> sequences;
  for (const int64_t n : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500})
    for (const int64_t begin : {0, 1, 15, 63, 64, 127, 1000})
      sequences.push_back({begin, begin + n, static_cast<int32_t>(std::min<int64_t>(n, 1 + (n * 7 + begin) % 65))});
  for (const TypePair types : pairs)
    for (const int32_t dim : {64, 128, 256}) assert_right_twice(options_of(types, dim, 2, sequences));
}

// Groups that do not divide a tile, more query rows than a tile has, whole prompts, and a batch in which most sequences have
// no query.
void ragged_batches(void**) {
  for (const TypePair types : pairs)
    for (const int32_t group : {1, 3, 5, 16})
      assert_right_twice(options_of(types, 128, group,
                                    {{0, 150, 150}, {30, 200, 1}, {100, 103, 3}, {0, 1, 0}, {0, 260, 129}, {64, 64, 0}}));
}

// Keys are shared out by length, among clusters of 8, 4 and 2 blocks with a rising number of KV heads, and among single
// blocks. There are more sequences than a warp has lanes, with the longest at the end. Windows make it shorter than others.
void unlike_lengths(void**) {
  std::vector<WindowSequence> few = {{0, 40, 9}, {0, 9000, 16}, {0, 300, 2}, {5, 5, 0}, {77, 3000, 33}, {0, 17, 17}};
  std::vector<WindowSequence> many;
  for (int32_t i = 0; i < 40; ++i) many.push_back({i, 40 + 3 * i, 1 + i % 9});
  many.push_back({0, 6000, 20});
  uint64_t seed = 1;
  for (const TypePair types : pairs)
    for (const int32_t kv_heads : {1, 4, 8, 16}) {
      WindowOptions options =
          tandem::test::options_of(types, kv_heads, 128, kv_heads < 8 ? 4 : 1, kv_heads == 4 ? many : few);
      options.q_type = types.k == TANDEM_F16 ? TANDEM_F16 : TANDEM_BF16;
      if (kv_heads == 1) options.layer.sinks.assign(static_cast<size_t>(options.layer.n_q_heads), 0.5f);
      options.seed = seed++;
      assert_right_twice(options);
      options.layer.sliding_window = 500;
      assert_right_twice(options);
    }
}

// Items with few tiles of keys use one of their clusters, items with many use all. The cases have one sequence and several,
// and lengths change between calls of one launch. The first sequence's lengths lie where an H100 switches: twice for 16-bit
// numbers, then for 4 bits and e4m3, and for 8 bits.
void one_cluster_or_all(void**) {
  const std::vector<WindowSequence> batches[] = {
      {{0, 5504, 260}}, {{0, 3968, 40}}, {{0, 9000, 40}, {5, 3000, 33}, {0, 100, 3}}};
  uint64_t seed = 1;
  for (const TypePair types : pairs)
    for (const std::vector<WindowSequence>& sequences : batches) {
      WindowOptions options = tandem::test::options_of(types, 1, 64, 1, sequences);
      options.q_type = types.k == TANDEM_F16 ? TANDEM_F16 : TANDEM_BF16;
      if (seed % 2 == 0) options.layer.sinks = {0.5f};
      options.seed = seed++;
      WindowCase c(*device, options);
      for (const int64_t n_fewer : {0, 256, 2432, 1472}) {
        c.shorten(n_fewer);
        assert_right(c, options);
      }
      options.layer.sliding_window = 2500;
      assert_right_twice(options);
    }
}

void sliding_windows_soft_caps_and_sinks(void**) {
  for (const TypePair types : pairs)
    for (const int64_t window : {1, 16, 100, 700})
      for (const float cap : {0.0f, 5.0f, 30.0f}) {
        WindowOptions options = options_of(types, window == 16 ? 128 : 96, 4, {{0, 900, 70}, {37, 240, 200}, {0, 5, 2}});
        options.layer.sliding_window = window;
        options.layer.soft_cap = cap;
        for (int32_t i = 0; i < options.layer.n_q_heads; ++i)
          options.layer.sinks.push_back(0.5f * static_cast<float>(i) - 2.0f);
        assert_right_twice(options);
      }
}

// Each head has a range and a sliding window of its own.
void lists_of_ranges(void**) {
  uint64_t seed = 1;
  for (const TypePair types : pairs)
    for (const int32_t dim : {64, 128, 256})
      for (const int32_t q_type : {TANDEM_BF16, TANDEM_F32})
        for (const int64_t newest : {40, 300, 5000}) {
          WindowOptions options = options_of(types, dim, 4, {{0, 333, 90}, {70, 1200, 21}, {64, 64, 3}, {0, 700, 300}});
          options.q_type = q_type;
          options.lists.n_heads = seed % 3 == 0 ? 1 : 2;
          options.lists.share = 0.0;
          options.lists.newest = newest;
          options.lists.sliding_window = seed % 2 == 0 ? 60 : 0;
          options.seed = seed++;
          assert_right_twice(options);
        }
}

// Each query names keys for itself. Keys that no query names are NaN.
WindowOptions tiles_of(TypePair types, int32_t dim, int32_t group, std::vector<WindowSequence> sequences,
                       const tandem::test::TileOptions& tiles) {
  WindowOptions options = options_of(types, dim, group, std::move(sequences));
  options.tiles = tiles;
  return options;
}

void tiles_of_types_and_dims(void**) {
  uint64_t seed = 1;
  for (const TypePair types : pairs)
    for (const int32_t dim : {64, 96, 128, 192, 256})
      for (const int32_t q_type : {TANDEM_BF16, TANDEM_F16, TANDEM_F32})
        for (const int32_t n_heads : {1, 2}) {
          const int32_t group = seed % 4 == 0 ? 1 : seed % 4 == 1 ? 4 : seed % 4 == 2 ? 16 : 5;
          WindowOptions options = tiles_of(types, dim, group, {{0, 333, 90}, {70, 1200, 21}, {64, 64, 3}, {0, 5, 0}},
                                           {.n_heads = n_heads, .unit = n_heads * 64, .share = seed % 3 == 0 ? 0.1 : 0.4});
          options.q_type = q_type;
          options.o_type = seed % 5 == 0 ? TANDEM_BF16 : TANDEM_F32;
          if (seed % 7 == 0) options.layer.soft_cap = 5.0f;
          options.seed = seed++;
          assert_right_twice(options);
        }
}

// Queries name few of many keys. The others are NaN, so a kernel that reads them fails.
void tiles_of_long_sequences(void**) {
  for (const TypePair types : pairs)
    for (const int32_t dim : {64, 128, 256})
      for (const int32_t unit : {64, 128, 256})
        assert_right_twice(tiles_of(types, dim, 8, {{0, 9000, 33}, {1000, 7777, 100}, {0, 300, 300}},
                                    {.n_heads = 2, .unit = unit, .share = unit == 64 ? 0.5 : 0.03, .n_shared = 5}));
}

// One to 128 queries in a list, and groups that divide no list.
void tiles_of_groups(void**) {
  for (const TypePair types : pairs)
    for (const int32_t group : {1, 2, 3, 5, 7, 16, 32, 48}) {
      WindowOptions options =
          tiles_of(types, 128, group, {{0, 700, 200}, {30, 200, 1}, {64, 64, 0}}, {.n_heads = 2, .share = 0.2});
      assert_right_twice(options);
      options.tiles.classes_by = tandem::kByHead;
      if (group <= 32) assert_right_twice(options);
    }
}

void tiles_with_windows_caps_and_sinks(void**) {
  for (const TypePair types : pairs)
    for (const int64_t window : {16, 700})
      for (const float cap : {0.0f, 5.0f}) {
        WindowOptions options = tiles_of(types, 128, 4, {{0, 900, 70}, {37, 240, 200}, {0, 5, 2}},
                                         {.n_heads = 1, .unit = 128, .share = 0.5, .n_shared = 3});
        options.layer.sliding_window = window;
        options.layer.soft_cap = cap;
        for (int32_t i = 0; i < options.layer.n_q_heads; ++i)
          options.layer.sinks.push_back(0.5f * static_cast<float>(i) - 2.0f);
        assert_right_twice(options);
      }
}

void tiles_in_pages_of_other_lengths(void**) {
  for (const TypePair types : pairs)
    for (const int32_t page_len : {64, 192, 256}) {
      WindowOptions options = tiles_of(types, 128, 4, {{0, 700, 40}, {100, 1500, 30}}, {.n_heads = 2, .unit = 256});
      options.page_len = page_len;
      assert_right_twice(options);
    }
}

// Each part has lists of its own, which may be empty.
void tiles_go_into_states(void**) {
  for (const TypePair types : pairs)
    for (const int32_t q_type : {TANDEM_F32, TANDEM_BF16})
      for (const int64_t n_parts : {1, 2, 5}) {
        WindowOptions options = tiles_of(types, n_parts == 2 ? 128 : 80, 4, {{0, 900, 70}, {70, 1200, 300}, {0, 3, 1}},
                                         {.n_heads = 2, .unit = 128, .share = 0.2});
        options.q_type = q_type;
        if (n_parts == 5) options.layer.sliding_window = 600;
        for (int32_t i = 0; i < options.layer.n_q_heads && n_parts != 1; ++i)
          options.layer.sinks.push_back(0.5f * static_cast<float>(i) - 2.0f);
        WindowCase c(*device, options);
        c.clear_output();
        c.attend_parts(n_parts);
        assert_left_right(c, options);
      }
}

void tiles_over_few_keys(void**) {
  constexpr tandem::test::KernelCall kCalls[] = {{4, TANDEM_BF16, 0.0f}, {4, TANDEM_F16, 0.0f}, {4, TANDEM_F32, 5.0f}};
  for (const TypePair types : pairs)
    tandem::test::for_every_kernel(types, {{0, 512, 70}, {70, 333, 21}, {10, 10, 3}}, kCalls, [](WindowOptions options) {
      options.tiles = {.n_heads = 2};
      WindowCase c(*device, options);
      assert_right(c, options);
    });
}

void tiles_that_are_wrong_are_refused(void**) {
  const struct {
    int32_t code;
    const char* text;
    void (*spoil)(tandem::DeviceAttend& call);
  } kBad[] = {
      {TANDEM_ERROR_INVALID_ARGUMENT, "tiles.lists = 0", [](tandem::DeviceAttend& call) { call.tiles.lists = nullptr; }},
      {TANDEM_ERROR_INVALID_ARGUMENT, "tiles.keys = 0", [](tandem::DeviceAttend& call) { call.tiles.keys = nullptr; }},
      {TANDEM_ERROR_INVALID_ARGUMENT, "tiles.n_heads = 3", [](tandem::DeviceAttend& call) { call.tiles.n_heads = 3; }},
      {TANDEM_ERROR_INVALID_ARGUMENT, "tiles.per_head = 1", [](tandem::DeviceAttend& call) { call.tiles.per_head = 1; }},
      {TANDEM_ERROR_INVALID_ARGUMENT, "tiles.per_sequence = 5",
       [](tandem::DeviceAttend& call) { call.tiles.per_sequence = 5; }},
      {TANDEM_ERROR_INVALID_ARGUMENT, "tiles.most_tiles = -1",
       [](tandem::DeviceAttend& call) { call.tiles.most_tiles = -1; }},
      {TANDEM_ERROR_INVALID_ARGUMENT, "tiles.classes_by = 2", [](tandem::DeviceAttend& call) { call.tiles.classes_by = 2; }},
      {TANDEM_ERROR_UNSUPPORTED, "tiles.classes_by = 1", [](tandem::DeviceAttend& call) { call.tiles.classes_by = 1; }},
  };
  for (const auto& bad : kBad) {
    WindowCase c(*device, tiles_of({TANDEM_BF16, TANDEM_BF16}, 128, 48, {{0, 333, 7}, {0, 333, 2}}, {.n_heads = 2}));
    bad.spoil(c.call());
    tandem::DeviceError error;
    assert_int_equal(c.try_attend(&error), bad.code);
    assert_string_equal(error.field, "tiles");
    if (std::strstr(error.message, bad.text) == nullptr) fail_msg("%s: %s", bad.text, error.message);
  }
}

void keys_behind_the_window_may_be_nan(void**) {
  for (const TypePair types : pairs)
    for (const int32_t q_len : {17, 150}) {
      WindowOptions options = options_of(types, 128, 4, {{0, 500, q_len}, {3, 333, 33}, {0, 930, 2}});
      options.layer.sliding_window = 100;
      options.hides_old = true;
      assert_right_twice(options);
    }
}

void rows_that_see_nothing(void**) {
  WindowOptions options = options_of({TANDEM_BF16, TANDEM_BF16}, 64, 2, {{40, 60, 40}, {10, 10, 2}, {0, 100, 1}});
  assert_right_twice(options);
  options.layer.sinks = {-INFINITY, 0.5f, -2.0f, 0.0f};
  assert_right_twice(options);
}

void bad_numbers_stay_where_they_are(void**) {
  constexpr int64_t kPlaces[] = {-1, -20, 0, 40, 150};
  for (const TypePair types : pairs) {
    const WindowOptions options = options_of(types, 128, 4, {{0, 333, 90}, {70, 1200, 21}, {5, 2000, 30}});
    const std::string fault = tandem::test::check_bad_numbers(*device, options, kPlaces);
    if (!fault.empty()) fail_msg("%s", fault.c_str());
  }
}

void weights_far_below_the_largest(void**) {
  constexpr int32_t kGroups[] = {1, 4};
  for (const TypePair types : pairs)
    tandem::test::for_far_weights(types, {{0, 333, 90}, {70, 1200, 21}}, kGroups, assert_right_twice);
}

void pages_of_other_lengths(void**) {
  for (const TypePair types : pairs)
    for (const int32_t page_len : {64, 192, 256}) {
      WindowOptions options = options_of(types, 128, 4, {{0, 700, 40}, {100, 1500, 30}});
      options.page_len = page_len;
      assert_right_twice(options);
    }
}

// As a graph is replayed: the launch stays the same, lengths in device memory change.
void lengths_change_between_calls(void**) {
  for (const TypePair types : pairs) {
    const WindowOptions options = options_of(types, 128, 4, {{0, 2000, 50}, {50, 900, 20}, {0, 1100, 1}});
    WindowCase c(*device, options);
    for (const int64_t n_fewer : {0, 1, 130, 800, 1500}) {
      c.shorten(n_fewer);
      assert_right(c, options);
    }
  }
}

// Calls of decode and of prefill can use one workspace in turn.
void a_workspace_serves_every_call(void**) {
  WindowCase prefill(*device, options_of({TANDEM_BF16, TANDEM_BF16}, 128, 4, {{0, 3000, 40}, {0, 100, 64}}));
  WindowCase decode(*device, options_of({TANDEM_Q4_0, TANDEM_Q4_0}, 128, 8, {{0, 4000, 2}}));
  const int64_t bytes = std::max(prefill.workspace_bytes(), decode.workspace_bytes());
  void* workspace = device->allocate(bytes);
  device->upload(workspace, std::vector<char>(static_cast<size_t>(bytes)).data(), bytes);
  for (int i = 0; i < 3; ++i)
    for (WindowCase* c : {&prefill, &decode}) {
      c->use_workspace(workspace);
      c->clear_output();
      c->attend(0);
      const reference::GateVerdict verdict = c->check();
      if (!verdict.pass) fail_msg("round %d: %s", i, verdict.message.c_str());
    }
  device->table->release(device->self, workspace);
}

// The workspace of a call also serves calls with fewer sequences and queries, whatever the type of their queries. Bytes
// after it do not change.
void a_workspace_serves_shorter_calls(void**) {
  constexpr int64_t kBehind = 65536;
  struct {
    int32_t dim;
    std::vector<WindowSequence> whole, part;
  } const calls[] = {{128, std::vector<WindowSequence>(48, {0, 300, 32}), std::vector<WindowSequence>(32, {0, 300, 16})},
                     {256, {{0, 600, 256}}, {{0, 600, 256}}}};
  for (const TypePair types : pairs)
    for (const auto& call : calls) {
      WindowOptions whole = tandem::test::options_of(types, 8, call.dim, 4, call.whole);
      whole.q_type = TANDEM_BF16;
      const int64_t bytes = WindowCase(*device, whole).workspace_bytes();
      void* workspace = device->allocate(bytes + kBehind);
      device->upload(workspace, std::vector<char>(static_cast<size_t>(bytes)).data(), bytes);
      WindowOptions options = tandem::test::options_of(types, 8, call.dim, 4, call.part);
      options.q_type = TANDEM_F32;
      WindowCase c(*device, options);
      c.use_workspace(workspace);
      assert_right(c, options);
      std::vector<uint8_t> behind(kBehind);
      device->download(behind.data(), static_cast<std::byte*>(workspace) + bytes, kBehind);
      device->table->release(device->self, workspace);
      assert_true(behind == std::vector<uint8_t>(kBehind, 0xff));
    }
}

void sizes_of_queries(void**) {
  for (const TypePair types : pairs)
    for (const int32_t q_type : {TANDEM_F32, TANDEM_BF16})
      for (const double size : {1e-10, 1e-3, 10.0}) {
        WindowOptions options = options_of(types, 128, 4, {{0, 1000, 30}});
        options.q_size = size;
        options.q_type = q_type;
        assert_right_twice(options);
      }
}

void long_diffuse_attention(void**) {
  for (const TypePair types : pairs)
    for (const int32_t q_type : {TANDEM_F32, TANDEM_BF16}) {
      WindowOptions options = options_of(types, 128, 4, {{0, 20000, 17}});
      options.q_size = 0.01;
      options.v_mean = 0.5;
      options.q_type = q_type;
      assert_right_twice(options);
    }
}

// Keys in parts, with a call for each part: with many queries, and with so few that another kernel would take them if no
// earlier states came in.
void parts_go_into_states(void**) {
  const std::vector<WindowSequence> many = {{0, 900, 70}, {70, 1200, 300}, {0, 3, 1}, {10, 10, 2}}, few = {{5, 3000, 2}};
  for (const TypePair types : pairs)
    for (const int32_t q_type : {TANDEM_F32, TANDEM_BF16})
      for (const int64_t n_parts : {1, 2, 5})
        for (const auto& sequences : {many, few}) {
          WindowOptions options = options_of(types, n_parts == 2 ? 128 : 80, 4, sequences);
          options.q_type = q_type;
          options.o_type = n_parts == 5 ? TANDEM_F32 : q_type;
          if (n_parts == 5) options.layer.sliding_window = 600;
          for (int32_t i = 0; i < options.layer.n_q_heads && n_parts != 1; ++i)
            options.layer.sinks.push_back(0.5f * static_cast<float>(i) - 2.0f);
          WindowCase c(*device, options);
          for (int i = 0; i < 2; ++i) {
            c.clear_output();
            c.attend_parts(n_parts);
            assert_left_right(c, options);
          }
        }
}

void repeats_are_bit_equal(void**) {
  for (const TypePair types : pairs) {
    const WindowOptions options = options_of(types, 128, 4, {{0, 3000, 33}, {64, 1000, 20}, {5, 170, 100}});
    WindowCase c(*device, options);
    assert_right(c, options);
    const std::vector<uint8_t> first = c.output();
    for (int i = 0; i < 250; ++i) {
      c.clear_output();
      c.attend(0);
      assert_true(c.output() == first);
    }
  }
}

void what_has_no_kernel_is_refused(void**) {
  tandem::DeviceError error;
  WindowCase c(*device, options_of({TANDEM_F16, TANDEM_BF16}, 128, 4, {{0, 100, 50}}));
  assert_int_equal(c.supports(&error), TANDEM_ERROR_UNSUPPORTED);
  assert_string_equal(error.field, "k_type");
}

}  // namespace

int main(int argc, char** argv) {
  OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  pairs = tandem::test::pairs_of(argc, argv);
  const CMUnitTest tests[] = {
      cmocka_unit_test(types_and_dims),
      cmocka_unit_test(every_kernel_over_few_keys),
      cmocka_unit_test(few_rows),
      cmocka_unit_test(lengths_and_begins),
      cmocka_unit_test(ragged_batches),
      cmocka_unit_test(unlike_lengths),
      cmocka_unit_test(one_cluster_or_all),
      cmocka_unit_test(sliding_windows_soft_caps_and_sinks),
      cmocka_unit_test(lists_of_ranges),
      cmocka_unit_test(tiles_of_types_and_dims),
      cmocka_unit_test(tiles_of_long_sequences),
      cmocka_unit_test(tiles_of_groups),
      cmocka_unit_test(tiles_with_windows_caps_and_sinks),
      cmocka_unit_test(tiles_in_pages_of_other_lengths),
      cmocka_unit_test(tiles_go_into_states),
      cmocka_unit_test(tiles_over_few_keys),
      cmocka_unit_test(tiles_that_are_wrong_are_refused),
      cmocka_unit_test(keys_behind_the_window_may_be_nan),
      cmocka_unit_test(rows_that_see_nothing),
      cmocka_unit_test(bad_numbers_stay_where_they_are),
      cmocka_unit_test(weights_far_below_the_largest),
      cmocka_unit_test(pages_of_other_lengths),
      cmocka_unit_test(lengths_change_between_calls),
      cmocka_unit_test(a_workspace_serves_every_call),
      cmocka_unit_test(a_workspace_serves_shorter_calls),
      cmocka_unit_test(sizes_of_queries),
      cmocka_unit_test(long_diffuse_attention),
      cmocka_unit_test(parts_go_into_states),
      cmocka_unit_test(repeats_are_bit_equal),
      cmocka_unit_test(what_has_no_kernel_is_refused),
  };
  const int n_failed = cmocka_run_group_tests(tests, nullptr, nullptr);
  std::printf("shares of the bounds used: naive %.3f, eps mass %.3f, lse %.3f; with rounded weights %.3f, %.3f, %.3f\n",
              exact.naive, exact.mass, exact.lse, rounded.naive, rounded.mass, rounded.lse);
  return n_failed;
}
