// SPDX-License-Identifier: MIT
// The choices of head patterns and the key lists made of them, against double precision.
//
//   patterns_test [MODULE [TYPE]]    TYPE: index of the only storage type of K, so that several can be tested at once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "device/pattern_case.h"
#include "with_cmocka.h"

namespace {

using namespace tandem;
using test::PatternCase;
using test::PatternOptions;

constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};
constexpr uint32_t kAllKinds =
    TANDEM_PATTERN_FULL | TANDEM_PATTERN_A_SHAPE | TANDEM_PATTERN_VERTICAL_SLASH | TANDEM_PATTERN_BLOCK_SPARSE;

const test::OpenDevice* device = nullptr;
std::span<const int32_t> types = kTypes;  // the types that this process tests

int32_t type_of(uint64_t seed) { return types[seed % types.size()]; }

// The stand-in ends the program at a wrong call, so tests do not make wrong calls on it.
bool is_stand_in() { return std::strncmp(device->info.name, "Stand-in", 8) == 0; }

void expect_right(const PatternCase& c, const std::string& fault) {
  if (!fault.empty()) fail_msg("%s: %s", c.describe().c_str(), fault.c_str());
}

DeviceHeadPattern head_of(uint32_t kinds, reference::Random& random) {
  DeviceHeadPattern head;
  head.kinds = kinds;
  if ((kinds & TANDEM_PATTERN_A_SHAPE) != 0) {
    head.sink_len = random.integer(0, 150);
    head.window_len = random.integer(1, 400);
  }
  if ((kinds & TANDEM_PATTERN_VERTICAL_SLASH) != 0) {
    head.n_tokens = static_cast<int32_t>(random.pick({0, 1, 30, 200, 100000}));
    head.n_bands = static_cast<int32_t>(random.pick({1, 2, 10, 30, 10000}));
  }
  if ((kinds & TANDEM_PATTERN_BLOCK_SPARSE) != 0) head.n_blocks = static_cast<int32_t>(random.pick({0, 1, 4, 12, 1000}));
  return head;
}

PatternOptions any_options(uint64_t seed) {
  reference::Random random(seed + 7000);
  PatternOptions options;
  options.k_type = type_of(seed);
  options.q_type = random.pick({TANDEM_F32, TANDEM_BF16, TANDEM_BF16, TANDEM_F16});
  options.dim = random.pick({64, 64, 80, 128, 128, 256});
  options.n_kv_heads = static_cast<int32_t>(random.integer(1, 2));
  options.group_size = static_cast<int32_t>(random.pick({1, 2, 3, 4, 6}));
  options.is_rotated = options.k_type != TANDEM_F32 && random.chance(0.15);
  options.page_len = random.pick({64, 128, 256});
  options.q_gap = random.chance(0.3) ? 64 : 0;
  options.more_keys = random.pick({0, 0, 1, 700});
  options.list_queries = random.pick({1, 8, 16, 21, 32, 64, 128});
  for (int32_t h = 0; h < options.n_kv_heads * options.group_size; ++h)
    options.heads.push_back(head_of(static_cast<uint32_t>(random.integer(1, 15)), random));
  options.seed = seed;
  return options;
}

// Checks the lists of all heads at once, and of one head of each group at a time.
void expect_all_right(PatternCase& c, const PatternOptions& options) {
  expect_right(c, c.index());
  const int32_t group_size = options.group_size, n_kv_heads = options.n_kv_heads;
  expect_right(c, c.list({0, 1, n_kv_heads * group_size}));
  for (int32_t g = 0; g < group_size; ++g) expect_right(c, c.list({g, group_size, n_kv_heads}));
}

void any_calls(void**) {
  constexpr int32_t kQueries[] = {1, 63, 64, 65, 128, 129, 200, 0, 1000};
  for (uint64_t seed = 1; seed <= 36; ++seed) {
    PatternOptions options = any_options(seed);
    reference::Random random(seed + 100);
    for (int64_t i = random.integer(1, 3); i > 0; --i) {
      const int32_t q_len = kQueries[(seed * 3 + static_cast<uint64_t>(i)) % std::size(kQueries)];
      options.sequences.push_back(
          {std::max<int64_t>(1, q_len + random.pick({0, 5, 200, 700}) + random.integer(0, 70)), q_len});
    }
    PatternCase c(*device, options);
    expect_all_right(c, options);
  }
}

// The first query may be any token.
void all_first_tokens(void**) {
  for (int64_t first = 0; first < 70; first += 3) {
    PatternOptions options = any_options(static_cast<uint64_t>(first) + 500);
    reference::Random random(static_cast<uint64_t>(first));
    options.dim = 64;
    options.n_kv_heads = 1;
    options.group_size = 2;
    options.heads = {head_of(TANDEM_PATTERN_VERTICAL_SLASH, random), head_of(TANDEM_PATTERN_BLOCK_SPARSE, random)};
    options.heads[0].n_tokens = 20, options.heads[0].n_bands = 4, options.heads[1].n_blocks = 2;
    options.sequences = {{300 + first, 140}, {first + 33, 33}, {130 + first, 1}};
    PatternCase c(*device, options);
    expect_all_right(c, options);
  }
}

// More keys than a block of threads walks over, and fewer in a second sequence.
void many_keys(void**) {
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    PatternOptions options;
    reference::Random random(seed);
    options.k_type = type_of(seed);
    options.q_type = seed % 2 == 0 ? TANDEM_F32 : TANDEM_BF16;
    options.dim = 64;
    options.group_size = 2;
    options.heads = {head_of(TANDEM_PATTERN_VERTICAL_SLASH, random), head_of(TANDEM_PATTERN_BLOCK_SPARSE, random)};
    options.heads[0].n_tokens = 700, options.heads[0].n_bands = 60, options.heads[1].n_blocks = 40;
    options.sequences = {{9000 + static_cast<int64_t>(seed), 300}, {2500, 64}, {2048, 20}};
    options.seed = seed;
    PatternCase c(*device, options);
    expect_all_right(c, options);
  }
}

// So many KV heads that a block of threads walks over several pieces of a head's keys. Few query heads choose any.
void many_heads(void**) {
  PatternOptions options;
  reference::Random random(3);
  options.k_type = type_of(3);
  options.dim = 64;
  options.n_kv_heads = 48;
  options.group_size = 2;
  for (int32_t h = 0; h < options.n_kv_heads * options.group_size; ++h) {
    options.heads.push_back(head_of(h % 11 == 0 ? TANDEM_PATTERN_VERTICAL_SLASH : TANDEM_PATTERN_A_SHAPE, random));
    if (h % 11 == 0) options.heads.back().n_tokens = 90, options.heads.back().n_bands = 20;
  }
  options.sequences = {{3300, 70}};
  PatternCase c(*device, options);
  expect_right(c, c.index());
  expect_right(c, c.list({0, 11, 9}));
}

// Equal keys have equal scores. The lower ones are chosen.
void equal_scores(void**) {
  for (const int64_t period : {1, 64, 192}) {
    PatternOptions options = any_options(static_cast<uint64_t>(period) + 40);
    reference::Random random(7);
    options.n_kv_heads = 1;
    options.group_size = 2;
    options.heads = {head_of(TANDEM_PATTERN_VERTICAL_SLASH, random), head_of(TANDEM_PATTERN_BLOCK_SPARSE, random)};
    options.heads[0].n_tokens = 300, options.heads[0].n_bands = 9, options.heads[1].n_blocks = 5;
    options.period = period;
    options.sequences = {{1200, 150}};
    PatternCase c(*device, options);
    expect_all_right(c, options);
  }
}

void scores_that_are_no_numbers(void**) {
  for (const bool has_query : {false, true}) {
    PatternOptions options = any_options(has_query ? 61 : 60);
    reference::Random random(8);
    options.n_kv_heads = 1;
    options.group_size = 2;
    options.heads = {head_of(TANDEM_PATTERN_VERTICAL_SLASH, random), head_of(TANDEM_PATTERN_BLOCK_SPARSE, random)};
    options.heads[0].n_tokens = 70, options.heads[0].n_bands = 6, options.heads[1].n_blocks = 11;
    options.has_nan_query = has_query;
    options.nan_token = has_query ? -1 : 130;
    options.sequences = {{900, 200}, {700, 70}};
    PatternCase c(*device, options);
    expect_all_right(c, options);
  }
}

// Lists made of any bits: few set, and nearly all. The longest list has more units than a kernel reads in one go.
void lists_of_any_choices(void**) {
  uint64_t seed = 1;
  for (const double share : {0.0, 0.001, 0.1, 0.99})
    for (const int64_t end : {200, 4000, 290'000}) {
      if (end > 4000 && share == 0.1) continue;
      PatternOptions options = any_options(1000 + seed);
      reference::Random random(seed);
      options.has_keys = false;
      options.n_kv_heads = 1;
      options.group_size = 2;
      options.heads = {head_of(TANDEM_PATTERN_VERTICAL_SLASH, random),
                       head_of(kAllKinds & ~(TANDEM_PATTERN_FULL | TANDEM_PATTERN_VERTICAL_SLASH), random)};
      options.heads[1].sink_len = end / 3;
      options.sequences = {{end, 140}, {end / 2, 3}};
      options.seed = seed++;
      PatternCase c(*device, options);
      c.choose_any(share);
      expect_right(c, c.list({0, 1, 2}));
    }
}

// A list without room for its granules is wrong, and the others are right.
void lists_without_room(void**) {
  if (is_stand_in()) return;
  PatternOptions options = any_options(77);
  reference::Random random(77);
  options.n_kv_heads = 1;
  options.group_size = 2;
  options.heads = {head_of(TANDEM_PATTERN_VERTICAL_SLASH, random), head_of(TANDEM_PATTERN_A_SHAPE, random)};
  options.heads[0].n_tokens = 200, options.heads[0].n_bands = 20;
  options.heads[1].sink_len = 77;
  options.n_granules = 10;
  options.sequences = {{1500, 300}};
  PatternCase c(*device, options);
  expect_all_right(c, options);
}

void expect_refused(const PatternCase& c, const DevicePatterns& call, int32_t code, const char* field) {
  for (const auto& function : {device->table->index_patterns, device->table->list_patterns}) {
    DeviceError error;
    const int32_t got = function(device->self, &call, nullptr, &error);
    if (got != code || std::strcmp(error.field, field) != 0)
      fail_msg("%s: status %d, field %s (%s)", c.describe().c_str(), got, error.field, error.message);
  }
}

void calls_that_are_refused(void**) {
  if (is_stand_in()) return;
  PatternOptions options = any_options(78);
  options.sequences = {{500, 100}};
  PatternCase c(*device, options);
  c.call().n_lists = 1;
  DevicePatterns call = c.call();
  call.kinds |= 16;
  expect_refused(c, call, TANDEM_ERROR_UNSUPPORTED, "kinds");
  call = c.call();
  call.sequences.max_q_len = TANDEM_PATTERN_CHUNK + 1;
  expect_refused(c, call, TANDEM_ERROR_UNSUPPORTED, "max_q_len");
  call = c.call();
  call.sequences.max_keys = int64_t{1} << 40;
  expect_refused(c, call, TANDEM_ERROR_UNSUPPORTED, "max_keys");
  call = c.call();
  call.pages.page_len = 96;
  expect_refused(c, call, TANDEM_ERROR_INVALID_ARGUMENT, "page_len");
}

std::span<const int32_t> types_of(int argc, char** argv) {
  const std::span<const int32_t> all = kTypes;
  if (argc <= 2) return all;
  char* end = nullptr;
  const long only = std::strtol(argv[2], &end, 10);
  if (*end != 0 || end == argv[2] || only < 0 || only >= std::ssize(all)) {
    std::fprintf(stderr, "TYPE = %s is none of 0 to %zu\n", argv[2], all.size() - 1);
    std::exit(2);
  }
  return all.subspan(static_cast<size_t>(only), 1);
}

}  // namespace

int main(int argc, char** argv) {
  test::OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  types = types_of(argc, argv);
  const CMUnitTest tests[] = {
      cmocka_unit_test(lists_of_any_choices),
      cmocka_unit_test(any_calls),
      cmocka_unit_test(all_first_tokens),
      cmocka_unit_test(many_keys),
      cmocka_unit_test(many_heads),
      cmocka_unit_test(equal_scores),
      cmocka_unit_test(scores_that_are_no_numbers),
      cmocka_unit_test(lists_without_room),
      cmocka_unit_test(calls_that_are_refused),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
