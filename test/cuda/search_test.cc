// SPDX-License-Identifier: MIT
// Searches for chunks, and bounds of chunks, against double precision.
//
//   search_test [MODULE [TYPE]]    TYPE: index of the only storage type of K, so that several can be tested at once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "device/search_case.h"
#include "lib/model/dtype.h"
#include "with_cmocka.h"

namespace {

using namespace tandem;
using test::SearchBlock;
using test::SearchCase;
using test::SearchOptions;

constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};

const test::OpenDevice* device = nullptr;
std::span<const int32_t> types = kTypes;  // the types that this process tests
test::SearchCounts counts;

int32_t type_of(uint64_t seed) { return types[seed % types.size()]; }

void expect_right(const SearchCase& c, const std::string& fault) {
  if (!fault.empty()) fail_msg("%s: %s", c.describe().c_str(), fault.c_str());
}

Judge any_judge(reference::Random& random) { return random.pick({Judge::kDescent, Judge::kBounds, Judge::kExact}); }

// Returns up to four stages with any judges. Each keeps some of the chunks that the one before keeps.
PruningRecord any_record(reference::Random& random, int64_t longest) {
  PruningRecord record;
  int64_t chunk_len = random.pick({256, 64, 64, 32, 16, 8}), largest = chunk_len, interval = 1;
  int64_t keep_len = random.integer(longest / 6, longest / 2);
  const int64_t n_stages = random.integer(1, 4);
  for (int64_t i = 0; i < n_stages; ++i) {
    PruningStage made = PruningStage{any_judge(random), chunk_len, 0, random.pick({1, 2, 4, 8, 16})};
    made.plus_next = i == n_stages - 1 && random.chance(0.4);
    const int64_t unit = made.plus_next ? 2 * chunk_len : chunk_len;
    made.keep_len = std::max<int64_t>(1, keep_len / unit) * unit;
    if (n_stages > 1 && random.chance(0.15)) made.from_len = random.integer(1, longest);
    if (n_stages > 1 && random.chance(0.15)) made.to_len = random.integer(1, longest);
    interval = std::max(interval, made.interval);
    record.stages.push_back(made);
    chunk_len = std::max<int64_t>(1, chunk_len >> random.integer(0, 2));
    keep_len = keep_len * random.integer(3, 8) / 10;
  }
  record.sink_len = largest * random.integer(0, 2);
  record.window_len = 2 * largest + interval - 1 + random.integer(0, 60);
  return record;
}

SearchOptions any_options(uint64_t seed) {
  reference::Random random(seed + 5000);
  SearchOptions options;
  options.k_type = type_of(seed);
  options.q_type = random.pick({TANDEM_F32, TANDEM_BF16, TANDEM_F16});
  options.dim = random.pick({64, 64, 80, 128, 128, 256});
  options.n_kv_heads = static_cast<int32_t>(random.integer(1, options.dim > 128 ? 2 : 8));
  options.group_size = static_cast<int32_t>(random.pick({1, 2, 3, 4, 5, 7, 8}));
  options.is_rotated = options.k_type != TANDEM_F32 && random.chance(0.15);
  options.page_len = random.pick({64, 128, 256});
  options.q_gap = random.chance(0.3) ? 64 : 0;
  options.shares_lists = random.chance(0.3);
  const int64_t longest = std::min<int64_t>(3000, 900'000 / (int64_t{options.n_kv_heads} * options.dim));
  for (int64_t i = random.integer(0, 2); i >= 0; --i) options.lengths.push_back(random.integer(1, longest));
  options.lengths[0] = longest;
  options.record = any_record(random, longest);
  options.seed = seed;
  return options;
}

// Returns one block for each sequence, whose query is the token before `end`.
std::vector<SearchBlock> decode_blocks(const std::vector<int64_t>& ends) {
  std::vector<SearchBlock> blocks;
  for (size_t s = 0; s < ends.size(); ++s) blocks.push_back({s, ends[s], 1, 7});
  return blocks;
}

void decode_any(void**) {
  constexpr int64_t kSteps = 6;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SearchOptions options = any_options(seed);
    options.n_blocks = static_cast<int32_t>(options.lengths.size());
    std::vector<int64_t> ends;
    std::vector<test::BoundedTokens> first, rest;
    for (const int64_t length : options.lengths) {
      ends.push_back(std::max<int64_t>(0, length - kSteps));
      first.push_back({0, ends.back() / 2});
      rest.push_back({ends.back() / 2, ends.back()});
    }
    SearchCase c(*device, options);
    expect_right(c, c.bound(first));
    expect_right(c, c.bound(rest));
    for (int64_t step = 0; step < kSteps; ++step) {
      for (size_t s = 0; s < ends.size(); ++s) ends[s] = std::min(ends[s] + 1, options.lengths[s]);
      expect_right(c, c.search(decode_blocks(ends)));
    }
    counts.include(c.counts());
  }
}

// Sequences grow by a token in each call. Some pause, one gets another mark, and one becomes shorter.
void decode_on(const SearchOptions& given, int64_t n_steps) {
  SearchOptions options = given;
  options.n_blocks = static_cast<int32_t>(options.lengths.size());
  reference::Random random(options.seed + 70);
  std::vector<int64_t> ends;
  std::vector<test::BoundedTokens> bounded;
  for (const int64_t length : options.lengths) {
    ends.push_back(length - n_steps);
    bounded.push_back({0, ends.back()});
  }
  SearchCase c(*device, options);
  expect_right(c, c.bound(bounded));
  std::vector<uint32_t> marks(ends.size(), 3);
  for (int64_t step = 0; step < n_steps; ++step) {
    if (step == n_steps / 2) marks[0] = 4;
    if (step == n_steps * 2 / 3) ends.back() -= 11, marks.back() = 0x80000001;
    std::vector<SearchBlock> blocks;
    for (size_t s = 0; s < ends.size(); ++s) {
      const bool pauses = s == 1 && random.chance(0.2);
      if (!pauses) ++ends[s];
      blocks.push_back({s, ends[s], pauses ? 0 : 1, marks[s]});
    }
    expect_right(c, c.search(blocks));
  }
  counts.include(c.counts());
}

PruningRecord record_of(std::vector<PruningStage> stages, int64_t sink_len, int64_t window_len) {
  return {sink_len, window_len, std::move(stages)};
}

void lists_are_kept(void**) {
  uint64_t seed = 1;
  const PruningRecord kRecords[] = {
      record_of({PruningStage{Judge::kBounds, 64, 512, 16}, PruningStage{Judge::kBounds, 16, 256, 8},
                 PruningStage{Judge::kExact, 8, 128, 4}},
                64, 150),
      record_of({PruningStage{Judge::kDescent, 64, 512, 16}, PruningStage{Judge::kDescent, 32, 256, 8},
                 PruningStage{Judge::kDescent, 8, 128, 4}},
                128, 143),
      record_of({PruningStage{Judge::kBounds, 8, 160, 4}}, 64, 100),
      record_of({PruningStage{Judge::kExact, 32, 320, 5}, PruningStage{Judge::kBounds, 8, 64, 12}}, 0, 90),
  };
  for (const bool shares : {false, true})
    for (PruningRecord record : kRecords) {
      SearchOptions options;
      options.record = record;
      options.record.stages.back().plus_next = seed % 2 == 1;
      options.k_type = type_of(seed);
      options.dim = seed % 3 == 0 ? 128 : 64;
      options.n_kv_heads = 2;
      options.group_size = seed % 4 == 0 ? 1 : 4;
      options.page_len = seed % 2 == 0 ? 64 : 128;
      options.shares_lists = shares;
      options.lengths = {1400, 900, 330};
      options.seed = 100 + seed++;
      decode_on(options, 48);
    }
}

// Stages begin and cease to exist as the sequence changes. At first, and at the end, none exists.
void stages_come_and_go(void**) {
  PruningRecord record = record_of({PruningStage{Judge::kBounds, 32, 320, 8}, PruningStage{Judge::kExact, 8, 64, 4},
                                    PruningStage{Judge::kDescent, 8, 64, 4}},
                                   32, 80);
  record.stages[0].from_len = 500;
  record.stages[1].from_len = 512;
  record.stages[1].to_len = 525;
  record.stages[2].from_len = 520;
  for (PruningStage& each : record.stages)
    if (each.to_len == 0) each.to_len = 540;
  for (const bool shares : {false, true}) {
    SearchOptions options;
    options.record = record;
    options.k_type = type_of(shares ? 1 : 2);
    options.dim = 64;
    options.shares_lists = shares;
    options.lengths = {545, 560, 700};
    decode_on(options, 60);
  }
}

void presets(void**) {
  uint64_t seed = 1;
  for (const char* name : {"small", "3k", "3k-fast", "3k-flash", "5k", "3k-5k", "16k-shallow"}) {
    PruningOfLayer found;
    assert_true(find_pruning_preset(name, 5, &found));
    SearchOptions options;
    options.record = found.decode;
    options.k_type = type_of(seed);
    options.dim = 64;
    options.n_kv_heads = 1;
    options.lengths = {36000, 6000, 1000};
    options.seed = 200 + seed++;
    decode_on(options, 5);
  }
}

// Returns blocks of up to 64 queries, of one sequence and of several.
std::vector<SearchBlock> append_blocks(const std::vector<int64_t>& lengths, int32_t block_len, reference::Random& random) {
  std::vector<SearchBlock> blocks;
  for (size_t s = 0; s < lengths.size(); ++s) {
    int64_t begin = lengths[s] - random.integer(1, std::min<int64_t>(lengths[s], 2 * block_len));
    for (; begin < lengths[s]; begin = blocks.back().end) {
      const int64_t q_len = std::min<int64_t>(block_len, lengths[s] - begin);
      blocks.push_back({s, begin + q_len, static_cast<int32_t>(q_len), 1});
    }
    if (random.chance(0.3)) blocks.push_back({s, lengths[s], 0, 1});
  }
  return blocks;
}

// Searches the same blocks twice.
void append_blocks_of(SearchOptions options, int32_t block_len, uint64_t seed) {
  reference::Random random(seed);
  options.keeps_lists = false;
  const std::vector<SearchBlock> blocks = append_blocks(options.lengths, block_len, random);
  options.n_blocks = static_cast<int32_t>(blocks.size());
  std::vector<test::BoundedTokens> bounded;
  for (const int64_t length : options.lengths) bounded.push_back({0, length});
  SearchCase c(*device, options);
  expect_right(c, c.bound(bounded));
  for (int i = 0; i < 2; ++i) expect_right(c, c.search(blocks));
  counts.include(c.counts());
}

void append_any(void**) {
  for (uint64_t seed = 1; seed <= 24; ++seed)
    append_blocks_of(any_options(1000 + seed), reference::Random(seed).pick({64, 64, 32, 16, 8, 1}), seed);
}

// Blocks of 16 queries and more in bf16, which have kernels of their own.
void append_many_queries(void**) {
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    SearchOptions options = any_options(2000 + seed);
    options.q_type = TANDEM_BF16;
    append_blocks_of(options, reference::Random(seed + 40).pick({64, 64, 63, 33, 16}), seed);
  }
}

void append_by_presets(void**) {
  uint64_t seed = 1;
  for (const char* name : {"small", "3k", "5k", "16k-shallow"})
    for (const int32_t dim : {64, 128}) {
      PruningOfLayer found;
      assert_true(find_pruning_preset(name, 5, &found));
      SearchOptions options;
      options.record = found.append;
      options.k_type = type_of(seed);
      options.dim = dim;
      options.n_kv_heads = 1;
      options.lengths = {36000, 6000};
      options.seed = 500 + seed;
      append_blocks_of(options, 64, seed++);
    }
}

// Of chunks with equal keys the lower ones are kept, in every stage. Of two halves of a chunk whose first keys are equal, a
// descent takes the lower one.
void equal_scores(void**) {
  constexpr Judge kJudges[] = {Judge::kBounds, Judge::kExact, Judge::kDescent};
  uint64_t seed = 1;
  for (const Judge first : kJudges)
    for (const Judge last : kJudges)
      for (const int64_t period : {0, 64, 192, 960}) {
        SearchOptions options;
        options.record = record_of({PruningStage{first, 64, 512, 8}, PruningStage{last, 8, 128, 4}}, 64, 160);
        options.record.stages[1].plus_next = seed % 3 == 0;
        options.k_type = type_of(seed);
        options.dim = seed % 2 == 0 ? 128 : 64;
        options.group_size = seed % 2 == 0 ? 4 : 1;
        options.shares_lists = seed % 5 == 0;
        options.keeps_lists = seed % 4 != 0;
        options.period = period;
        options.twin_distance = seed % 2 == 0 ? 4 : 32;
        options.lengths = {2100};
        options.seed = 300 + seed++;
        SearchCase c(*device, options);
        expect_right(c, c.bound({{0, 2098}}));
        for (const int64_t end : {2099, 2100}) expect_right(c, c.search(decode_blocks({end})));
        counts.include(c.counts());
      }
}

// Chunks whose keys are all NaN are kept before the others, both when they are fewer and when they are more than a stage
// keeps. If a query is NaN, all scores are.
void scores_that_are_no_numbers(void**) {
  constexpr Judge kJudges[] = {Judge::kBounds, Judge::kExact, Judge::kDescent};
  uint64_t seed = 1;
  for (const Judge first : kJudges)
    for (const Judge last : kJudges)
      for (const int64_t n_nan : {0, 128, 1280}) {
        SearchOptions options;
        options.record = record_of({PruningStage{first, 64, 512, 8}, PruningStage{last, 8, 256, 4}}, 64, 160);
        options.k_type = type_of(seed);
        options.dim = 64;
        options.group_size = n_nan > 0 ? 1 : 4;  // avoids log-sum-exps of lists, which would be NaN for all chunks
        options.shares_lists = false;
        options.nan_begin = 640;
        options.nan_end = 640 + n_nan;
        options.has_nan_query = n_nan == 0;
        options.lengths = {2300};
        options.seed = 400 + seed++;
        SearchCase c(*device, options);
        expect_right(c, c.bound({{0, 2298}}));
        for (const int64_t end : {2299, 2300}) expect_right(c, c.search(decode_blocks({end})));
        counts.include(c.counts());
      }
}

// The newest chunk that is complete before the query gets its bounds, for each chunk length, wherever the query is.
void newest_bounds(void**) {
  for (const int64_t page_len : {64, 128, 256})
    for (const int64_t end : {1, 2, 8, 9, 16, 17, 63, 64, 65, 66, 127, 128, 129, 256, 257, 258, 300, 513}) {
      SearchOptions options;
      options.record =
          record_of({PruningStage{Judge::kBounds, 64, 128, 4}, PruningStage{Judge::kBounds, 8, 64, 4}}, 64, 2000);
      options.more_bounds = {256, 16, 1};
      options.k_type = type_of(static_cast<uint64_t>(end));
      options.dim = 64;
      options.page_len = static_cast<int32_t>(page_len);
      options.lengths = {end};
      options.seed = static_cast<uint64_t>(end);
      SearchCase c(*device, options);
      expect_right(c, c.search(decode_blocks({end})));
    }
}

void bounds_of_any_chunks(void**) {
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    reference::Random random(seed + 900);
    SearchOptions options;
    options.k_type = type_of(seed);
    options.is_rotated = seed % 5 == 0;
    options.dim = random.pick({64, 80, 128, 256});
    options.n_kv_heads = static_cast<int32_t>(random.integer(1, 4));
    options.page_len = random.pick({64, 128, 256});
    options.record = record_of({PruningStage{Judge::kBounds, 8, 64, 4}}, 256, 600);
    options.more_bounds = {256, 64, 32, 2};
    options.lengths = {1 + random.integer(0, 1500), 700, 64, 1};
    options.seed = seed;
    std::vector<test::BoundedTokens> first, second;
    for (const int64_t length : options.lengths) {
      const int64_t bounded = random.integer(0, length), end = random.integer(bounded, length);
      first.push_back({bounded, end});
      second.push_back({end, length});
    }
    SearchCase c(*device, options);
    expect_right(c, c.bound(first));
    expect_right(c, c.bound(second));
    expect_right(c, c.bound(second));
  }
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
      cmocka_unit_test(bounds_of_any_chunks),
      cmocka_unit_test(newest_bounds),
      cmocka_unit_test(decode_any),
      cmocka_unit_test(lists_are_kept),
      cmocka_unit_test(stages_come_and_go),
      cmocka_unit_test(presets),
      cmocka_unit_test(append_any),
      cmocka_unit_test(append_many_queries),
      cmocka_unit_test(append_by_presets),
      cmocka_unit_test(equal_scores),
      cmocka_unit_test(scores_that_are_no_numbers),
  };
  const int n_failed = cmocka_run_group_tests(tests, nullptr, nullptr);
  std::printf("lists: %lld for certain, %lld but for rounding; stages: %lld ran, %lld of them judged, %lld stayed\n",
              static_cast<long long>(counts.n_strict), static_cast<long long>(counts.n_loose),
              static_cast<long long>(counts.n_stages_run), static_cast<long long>(counts.n_judged),
              static_cast<long long>(counts.n_stages_kept));
  return n_failed;
}
