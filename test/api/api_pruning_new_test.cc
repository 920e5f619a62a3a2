// SPDX-License-Identifier: MIT
// operator new fails in calls under policy "hip": the N-th time on any thread, once or from then on, for every N. A refused
// call changes nothing. Repeated, it gives the bits of a twin that never lacked memory.
#include "failing_new.h"
#include "one_in.h"
#include "pruned_world.h"

using namespace tandem_test;
using namespace failing_new;

namespace {

std::vector<tandem_pruning_stage> some_stages() {
  tandem_pruning_stage last = stage_of(TANDEM_JUDGE_EXACT, 8, 64, 2, 32);
  last.plus_next = 1;
  return {stage_of(TANDEM_JUDGE_BOUNDS, 32, 256, 4), stage_of(TANDEM_JUDGE_DESCENT, 16, 128, 3), last};
}

// State that a refused call must not change.
struct State {
  std::vector<uint64_t> digests;
  std::vector<std::vector<int64_t>> listed;
  tandem_session_stats stats;

  explicit State(const Keeper& keeper) : stats(keeper.stats()) {
    for (const int64_t id : keeper.ids) {
      digests.push_back(keeper.digest(id));
      for (int32_t h = 0; h < kKvHeads; ++h) listed.push_back(keeper.listed(id, h));
    }
  }
  void expect_same(const State& now) const {
    assert_true(digests == now.digests && listed == now.listed);
    assert_memory_equal(&stats, &now.stats, sizeof stats);
  }
};

// Tensors of the calls of a life. All lives share them.
class Calls {
 public:
  explicit Calls(const Machine& machine) : machine_(machine) {}
  // Returns the i-th call, which is made on first use. It must have the same numbers of tokens each time.
  Batch& at(size_t i, const std::vector<std::pair<int64_t, int64_t>>& parts) {
    if (batches_.size() <= i) {
      batches_.push_back(std::make_unique<Batch>(machine_, 0, parts, static_cast<int64_t>(10 * i)));
      outputs_.push_back(batches_[i]->answers());
    }
    Batch& batch = *batches_[i];
    const auto lse = outputs_[i].begin() + std::ssize(batch.o.values);
    std::copy(outputs_[i].begin(), lse, batch.o.values.begin());
    std::copy(lse, outputs_[i].end(), batch.lse.values.begin());
    for (size_t p = 0; p < parts.size(); ++p) batch.sequences[p] = parts[p].first;
    return batch;
  }

 private:
  const Machine& machine_;
  std::vector<std::unique_ptr<Batch>> batches_;
  std::vector<std::vector<float>> outputs_;
};

// A series of calls: appends, decodes, batches, queries of stored tokens, a fork, speculative tokens.
class Life {
 public:
  Life(const Machine& machine, const Pruned& pruned, Calls& calls)
      : calls_(calls), keeper_(machine, pruned.options, short_pages(), 2) {}

  // Returns the number of refused calls.
  int run() {
    for (const auto& q_lens : std::vector<std::vector<int64_t>>{{260, 0}, {1, 0}, {1, 0}, {1, 130}, {1, 1}, {70, 1}, {1, 1}})
      attend(q_lens);
    attend({3, 1}, false);
    attempt([&](tandem_error** e) {
      int64_t id = 0;
      const int32_t status = tandem_sequence_fork(&id, keeper_.cache, keeper_.ids[0], e);
      if (status == TANDEM_OK) keeper_.ids[1] = id;
      return status;
    });
    for (int i = 0; i < 3; ++i) attend({1, 1});
    attend({4, 0}, true, TANDEM_ATTEND_SPECULATIVE);
    attempt([&](tandem_error** e) {
      static const int64_t kept[] = {0, 1};
      return tandem_session_commit(keeper_.session, keeper_.ids[0], kept, 2, e);
    });
    attend({1, 1});
    return n_refused_;
  }
  const std::vector<float>& answers() const { return answers_; }

 private:
  void attend(const std::vector<int64_t>& q_lens, bool appends = true, uint32_t flags = 0) {
    std::vector<std::pair<int64_t, int64_t>> parts;
    for (size_t i = 0; i < q_lens.size(); ++i)
      if (q_lens[i] > 0) parts.emplace_back(keeper_.ids[i], q_lens[i]);
    Batch& batch = calls_.at(n_calls_++, parts);
    batch.args.flags = flags;
    if (!appends) batch.ask_again();
    const std::vector<float> untouched = batch.answers();
    attempt([&](tandem_error** e) {
      const int32_t status = tandem_attend(keeper_.session, &batch.args, e);
      armed.store(false);
      if (status != TANDEM_OK) assert_same_bits(batch.answers(), untouched, "a refused call");
      return status;
    });
    const std::vector<float> got = batch.answers();
    answers_.insert(answers_.end(), got.begin(), got.end());
  }

  void attempt(const std::function<int32_t(tandem_error**)>& call) {
    const State before(keeper_);
    tandem_error* error = nullptr;
    armed.store(true);
    int32_t status = call(&error);
    armed.store(false);
    if (fails_at.load() > 0 && n_news.load() >= fails_at.load()) fails_at.store(0);  // the failure has happened
    if (status != TANDEM_OK) {
      ++n_refused_;
      if (status != TANDEM_ERROR_OUT_OF_MEMORY)
        print_error("after call %d: %s\n", static_cast<int>(n_calls_), tandem_error_message(error));
      tandem_error_release(error);
      assert_int_equal(status, TANDEM_ERROR_OUT_OF_MEMORY);
      before.expect_same(State(keeper_));
      error = nullptr;
      status = call(&error);
    }
    expect_ok(status, error);
  }

  Calls& calls_;
  Keeper keeper_;
  size_t n_calls_ = 0;
  int n_refused_ = 0;
  std::vector<float> answers_;
};

void run_all(int32_t shared_lists, bool keeps_failing) {
  const Machine machine;
  Calls calls(machine);
  Pruned pruned(32, 80, some_stages());
  pruned.pruning.shared_lists = shared_lists;
  fails_at.store(0);
  for_ever.store(keeps_failing);
  Life reference(machine, pruned, calls);
  assert_int_equal(reference.run(), 0);
  int n_runs = 0, n_refused = 0;
  const int64_t step = getenv("TANDEM_TEST_FULL") != nullptr ? 1 : 5 * tandem::test::one_in();
  for (int64_t n = 1;; n += step, ++n_runs) {
    Life life(machine, pruned, calls);
    n_news.store(0);
    fails_at.store(n);
    n_refused += life.run();
    assert_same_bits(life.answers(), reference.answers(), "allocation " + std::to_string(n));
    if (fails_at.load() != 0) break;
  }
  print_message("%d allocations failed one by one, and %d calls were refused\n", n_runs, n_refused);
  assert_true(n_refused > n_runs / 2 && n_refused * step > 150);
}

void fails_once(void**) { run_all(0, false); }
void fails_from_then_on(void**) { run_all(1, true); }

// Decode calls allocate only when a length or a size is reached for the first time.
void decode_takes_what_it_has(void**) {
  const Machine machine;
  const Pruned pruned(32, 80, some_stages());
  const Keeper keeper(machine, pruned.options, short_pages());
  keeper.append(keeper.ids[0], 600, 3);
  OK(tandem_sequence_reserve, keeper.cache, keeper.ids[0], 100);
  for_ever.store(false);
  fails_at.store(0);
  int n_that_took_none = 0;
  for (int i = 0; i < 36; ++i) {
    const Batch batch(machine, 0, {{keeper.ids[0], 1}}, 10 * i);
    n_news.store(0);
    armed.store(true);
    const int32_t status = tandem_attend(keeper.session, &batch.args, nullptr);
    armed.store(false);
    assert_int_equal(status, TANDEM_OK);
    n_that_took_none += i >= 12 && n_news.load() == 0;
  }
  assert_true(n_that_took_none >= 20);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(fails_once),
      cmocka_unit_test(fails_from_then_on),
      cmocka_unit_test(decode_takes_what_it_has),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
