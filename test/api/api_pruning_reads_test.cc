// SPDX-License-Identifier: MIT
// Memory that policy "hip" reads. Values that no query of a block attends, keys that no stage looks at, tokens after a
// query and rows after a sequence's end hold NaN. The answers must equal those of a twin without NaN.
#include <cstdlib>

#include "pruned_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kDescent = TANDEM_JUDGE_DESCENT, kBounds = TANDEM_JUDGE_BOUNDS, kExact = TANDEM_JUDGE_EXACT;
constexpr int64_t kSinks = 32, kWindow = 64, kPrompt = 350;

// Fills new memory with bytes that are NaN in every type.
void* nan_alloc(size_t bytes, size_t alignment, void*) {
  void* const data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  assert_non_null(data);
  return std::memset(data, 0xff, bytes);
}
void nan_free(void* data, size_t, void*) { std::free(data); }

tandem_engine_options nan_options() {
  tandem_engine_options options = small_engine_options();
  options.alloc = nan_alloc;
  options.free = nan_free;
  return options;
}

struct NanMachine : Machine {
  explicit NanMachine(const tandem_engine_options& options = nan_options()) : Machine({plain_layer()}, 2, &options) {}
};

using Places = std::vector<std::vector<int64_t>>;  // tokens of each KV head, ascending

// Overwrites rows [first, ...) of a tensor with NaN, except the rows that a KV head lists.
void forget_others(Tensor* tensor, int64_t first, const Places& listed) {
  const int64_t n = std::ssize(tensor->values) / (kKvHeads * kDim);
  for (int64_t t = 0; t < n; ++t)
    for (size_t h = 0; h < kKvHeads; ++h)
      if (!std::binary_search(listed[h].begin(), listed[h].end(), first + t))
        std::fill_n(tensor->values.begin() + (t * kKvHeads + static_cast<int64_t>(h)) * kDim, kDim, NAN);
}

void append_rows(const Keeper& to, const Batch& rows) {
  to.scatter();
  OK(tandem_sequence_append, to.cache, to.ids[0], 0, &rows.k.view, &rows.v.view, nullptr);
}

void assert_finite(const std::vector<float>& values) {
  for (const float x : values) assert_true(std::isfinite(x));
}

// The tokens before the call, and the call's tokens.
struct Rows {
  Batch prompt, call;
  Rows(const Machine& machine, int64_t id, int64_t n)
      : prompt(machine, 0, {{id, kPrompt}}, 5), call(machine, 0, {{id, n}}, 50) {}
  void forget_values(const Places& listed) {
    forget_others(&prompt.v, 0, listed);
    forget_others(&call.v, kPrompt, listed);
  }
};

Places lists_of(const Keeper& keeper, int64_t id) {
  Places listed;
  for (int32_t h = 0; h < kKvHeads; ++h) listed.push_back(keeper.listed(id, h));
  return listed;
}

std::vector<std::vector<tandem_pruning_stage>> some_stages() {
  tandem_pruning_stage next = stage_of(kExact, 8, 64);
  next.plus_next = 1;
  return {{stage_of(kBounds, 8, 64)},
          {stage_of(kDescent, 16, 64)},
          {stage_of(kExact, 8, 64)},
          {stage_of(kBounds, 32, 160), stage_of(kDescent, 16, 96), next}};
}

// Calls of one block: a decode call, and an append of up to 64 tokens.
void reads_listed_values_alone(void**) {
  const NanMachine machine;
  for (const auto& stages : some_stages())
    for (const int64_t n : {1, 2, 40, 64}) {
      const Pruned pruned(kSinks, kWindow, stages);
      const Keeper whole(machine, pruned.options, short_pages()), with_nan(machine, pruned.options, short_pages());
      Rows rows(machine, whole.ids[0], n);
      append_rows(whole, rows.prompt);
      OK(tandem_attend, whole.session, &rows.call.args);
      const std::vector<float> wanted = rows.call.answers();
      const Places listed = lists_of(whole, whole.ids[0]);
      for (const auto& list : listed) assert_true(std::ssize(list) < kPrompt - 50);
      rows.forget_values(listed);
      append_rows(with_nan, rows.prompt);
      rows.call.sequences = with_nan.ids;
      OK(tandem_attend, with_nan.session, &rows.call.args);
      assert_finite(wanted);
      assert_same_bits(rows.call.answers(), wanted, "block of " + std::to_string(n));
    }
}

// Returns the list of queries [first, first + n) of a call, which the twin attends as one block.
Places list_of_block(const Keeper& whole, const Batch& call, int64_t first, int64_t n) {
  int64_t fork = 0;
  OK(tandem_sequence_fork, &fork, whole.cache, whole.ids[0]);
  OK(tandem_sequence_truncate, whole.cache, fork, kPrompt + first + n);
  Batch block(whole.machine, 0, {{fork, n}}, 0);
  std::copy_n(call.q.values.begin() + first * kQHeads * kDim, n * kQHeads * kDim, block.q.values.begin());
  block.ask_again();
  OK(tandem_attend, whole.session, &block.args);
  Places listed = lists_of(whole, fork);
  OK(tandem_sequence_drop, whole.cache, fork);
  return listed;
}

// A long append of several blocks: each block reads the values of its own list, whatever other blocks attend.
void blocks_read_their_own_lists(void**) {
  const NanMachine machine;
  constexpr int64_t kAppend = 200, kBlock = 64;
  for (const auto& stages : some_stages()) {
    const Pruned pruned(kSinks, kWindow, stages);
    const Keeper whole(machine, pruned.options, short_pages());
    Rows rows(machine, whole.ids[0], kAppend);
    append_rows(whole, rows.prompt);
    OK(tandem_attend, whole.session, &rows.call.args);
    for (int64_t first = 0; first < kAppend; first += kBlock) {
      const int64_t n = std::min(kBlock, kAppend - first);
      if (n == 1) continue;
      const Keeper with_nan(machine, pruned.options, short_pages());
      Rows own(machine, with_nan.ids[0], kAppend);
      own.forget_values(list_of_block(whole, rows.call, first, n));
      append_rows(with_nan, own.prompt);
      OK(tandem_attend, with_nan.session, &own.call.args);
      const auto part = [&](const Batch& of) {
        const auto begin = of.o.values.begin() + first * kQHeads * kDim;
        return std::vector<float>(begin, begin + n * kQHeads * kDim);
      };
      assert_finite(part(rows.call));
      assert_same_bits(part(own.call), part(rows.call), "block at " + std::to_string(first));
    }
  }
}

// Keys and values after a query lie in its block, and in chunks that are scored for later calls.
void reads_nothing_behind_a_query(void**) {
  const NanMachine machine;
  constexpr int64_t kAppend = 150, kGood = 90;
  for (const auto& stages : some_stages()) {
    const Pruned pruned(kSinks, kWindow, stages);
    const Keeper whole(machine, pruned.options, short_pages()), with_nan(machine, pruned.options, short_pages());
    Rows rows(machine, whole.ids[0], kAppend);
    append_rows(whole, rows.prompt);
    append_rows(with_nan, rows.prompt);
    OK(tandem_attend, whole.session, &rows.call.args);
    const std::vector<float> wanted(rows.call.o.values.begin(), rows.call.o.values.begin() + kGood * kQHeads * kDim);
    for (Tensor* of : {&rows.call.k, &rows.call.v})
      std::fill(of->values.begin() + kGood * kKvHeads * kDim, of->values.end(), NAN);
    rows.call.sequences = with_nan.ids;
    OK(tandem_attend, with_nan.session, &rows.call.args);
    assert_finite(wanted);
    assert_same_bits({rows.call.o.values.begin(), rows.call.o.values.begin() + kGood * kQHeads * kDim}, wanted,
                     "NaN behind");
  }
}

// Truncated rows after a sequence's end: they held NaN, and bounds were computed from them.
void forgets_truncated_rows(void**) {
  const NanMachine machine;
  for (const auto& stages : some_stages()) {
    const Pruned pruned(kSinks, kWindow, stages);
    const Keeper whole(machine, pruned.options, short_pages()), with_nan(machine, pruned.options, short_pages());
    Rows rows(machine, whole.ids[0], 150);
    for (const Keeper* keeper : {&whole, &with_nan}) append_rows(*keeper, rows.prompt);
    Batch bad(machine, 0, {{with_nan.ids[0], 170}}, 900);
    for (Tensor* of : {&bad.k, &bad.v}) std::fill(of->values.begin(), of->values.end(), NAN);
    OK(tandem_attend, with_nan.session, &bad.args);
    OK(tandem_sequence_truncate, with_nan.cache, with_nan.ids[0], kPrompt);
    std::vector<float> wanted;
    for (const Keeper* keeper : {&whole, &with_nan}) {
      rows.call.sequences = keeper->ids;
      OK(tandem_attend, keeper->session, &rows.call.args);
      std::vector<float> got = rows.call.answers();
      for (int i = 0; i < 3; ++i) {
        const std::vector<float> more = keeper->turn({1}, 500 + 10 * i);
        got.insert(got.end(), more.begin(), more.end());
      }
      assert_finite(got);
      if (keeper == &with_nan) assert_same_bits(got, wanted, "truncated rows");
      wanted = got;
    }
  }
}

// ---- descent ----------------------------------------------------------------------------------------------------------

constexpr int64_t kKept = 64;

struct TokenSpan {
  int64_t begin, n;
};

// Returns the tokens of a chunk that one query head's descent looks at. *score: score of the last of them.
std::vector<int64_t> path_of(const std::vector<std::vector<float>>& logits, TokenSpan chunk, size_t q_head, float* score) {
  std::vector<int64_t> path = {chunk.begin};
  int64_t low = path[0];
  for (int64_t half = chunk.n / 2; half > 0; half /= 2) {
    path.push_back(low + half);
    if (logits[static_cast<size_t>(low + half)][q_head] > logits[static_cast<size_t>(low)][q_head]) low += half;
  }
  *score = logits[static_cast<size_t>(low)][q_head];
  return path;
}

// Returns the keys of one KV head that a stage of descent and a following exact stage may read, those of sinks and window
// included. *attended: the attended tokens if there is no other stage.
std::vector<int64_t> readable(const std::vector<std::vector<float>>& logits, size_t kv_head, int64_t chunk_len,
                              std::vector<int64_t>* attended) {
  const int64_t p0 = kPrompt, end = p0 + 1 - kWindow, n_chunks = (end + chunk_len - 1) / chunk_len;
  std::vector<int64_t> tokens;
  std::vector<std::pair<float, int64_t>> scores;
  for (int64_t chunk = kSinks / chunk_len; chunk < n_chunks; ++chunk) {
    float best = -INFINITY;
    for (size_t h = 2 * kv_head; h < 2 * (kv_head + 1); ++h) {
      float score = 0;
      const auto path = path_of(logits, {chunk * chunk_len, chunk_len}, h, &score);
      tokens.insert(tokens.end(), path.begin(), path.end());
      best = std::max(best, score);
    }
    scores.emplace_back(-best, chunk);
  }
  std::sort(scores.begin(), scores.end());
  for (int64_t i = 0; i < kKept / chunk_len; ++i)
    for (int64_t t = 0; t < chunk_len; ++t) attended->push_back(scores[static_cast<size_t>(i)].second * chunk_len + t);
  for (int64_t t = 0; t <= p0; ++t)
    if (t < kSinks || t >= end) attended->push_back(t);
  std::sort(attended->begin(), attended->end());
  attended->erase(std::unique(attended->begin(), attended->end()), attended->end());
  tokens.insert(tokens.end(), attended->begin(), attended->end());
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

// A descent reads only the keys of its paths. An exact stage after it reads only the chunks that were kept.
void descend(const Machine& machine, int64_t chunk_len) {
  for (const bool has_second : {false, true}) {
    std::vector<tandem_pruning_stage> stages = {stage_of(kDescent, chunk_len, kKept)};
    if (has_second) stages.push_back(stage_of(kExact, 8, 32));
    const Pruned pruned(kSinks, kWindow, stages);
    Keeper whole(machine, pruned.options, short_pages());
    const Keeper with_nan(machine, pruned.options, short_pages());
    Rows rows(machine, whole.ids[0], 1);
    append_rows(whole, rows.prompt);
    OK(tandem_attend, whole.session, &rows.call.args);
    const std::vector<float> wanted = rows.call.answers();
    std::vector<std::vector<float>> logits(kPrompt + 1);
    for (int64_t t = 0; t <= kPrompt; ++t) (void)whole.over(rows.call, {{t}}, &logits[static_cast<size_t>(t)]);
    Places read, attended(kKvHeads);
    for (size_t h = 0; h < kKvHeads; ++h) read.push_back(readable(logits, h, chunk_len, &attended[h]));
    if (!has_second) assert_true(lists_of(whole, whole.ids[0]) == attended);
    for (Batch* batch : {&rows.prompt, &rows.call}) {
      const int64_t first = batch == &rows.call ? kPrompt : 0;
      forget_others(&batch->k, first, read);
      forget_others(&batch->v, first, read);
    }
    append_rows(with_nan, rows.prompt);
    rows.call.sequences = with_nan.ids;
    OK(tandem_attend, with_nan.session, &rows.call.args);
    assert_finite(wanted);
    assert_same_bits(rows.call.answers(), wanted, has_second ? "descent, then exact" : "descent");
  }
}

// Chunks that lie in one page, and in two pages.
void descends_along_its_paths(void**) {
  const NanMachine machine;
  for (const int64_t chunk_len : {16, 32}) descend(machine, chunk_len);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(reads_listed_values_alone),    cmocka_unit_test(blocks_read_their_own_lists),
      cmocka_unit_test(reads_nothing_behind_a_query), cmocka_unit_test(forgets_truncated_rows),
      cmocka_unit_test(descends_along_its_paths),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
