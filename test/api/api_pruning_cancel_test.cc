// SPDX-License-Identifier: MIT
// Calls under policy "hip" stopped by a flag or a progress callback at moments spread over the whole call. Lists, bounds of
// chunks, counters and answers must equal those of a twin that was never stopped.
#include <atomic>
#include <chrono>
#include <thread>

#include "one_in.h"
#include "pruned_world.h"

using namespace tandem_test;

namespace {

using Clock = std::chrono::steady_clock;

std::vector<tandem_pruning_stage> some_stages() {
  tandem_pruning_stage last = stage_of(TANDEM_JUDGE_EXACT, 8, 64, 2, 32);
  last.plus_next = 1;
  return {stage_of(TANDEM_JUDGE_BOUNDS, 32, 512, 6), stage_of(TANDEM_JUDGE_DESCENT, 16, 160, 4), last};
}

int32_t stop_at(int64_t, int64_t, void* user) { return (*static_cast<int64_t*>(user))-- == 0 ? 1 : 0; }

// Attends, with the flag set before the call or after some time.
int32_t attend_with_flag(const Keeper& keeper, Batch* batch, std::chrono::microseconds after) {
  std::atomic<int32_t> flag{after.count() == 0 ? 1 : 0};
  static_assert(sizeof flag == sizeof(int32_t));
  std::atomic<bool> has_begun{false};
  std::thread setter([&] {
    while (!has_begun) std::this_thread::yield();
    for (const auto begin = Clock::now(); Clock::now() - begin < after;) std::this_thread::yield();
    flag = 1;
  });
  batch->args.cancel = reinterpret_cast<const int32_t*>(&flag);
  has_begun = true;
  const int32_t status = tandem_attend(keeper.session, &batch->args, nullptr);
  setter.join();
  batch->args.cancel = nullptr;
  return status;
}

struct State {
  uint64_t digest;
  tandem_session_stats stats;
  std::vector<int64_t> listed[kKvHeads];

  explicit State(const Keeper& keeper) : digest(keeper.digest(keeper.ids[0])), stats(keeper.stats()) {
    for (int32_t h = 0; h < kKvHeads; ++h) listed[h] = keeper.listed(keeper.ids[0], h);
  }
  void expect_same(const State& other) const {
    assert_true(digest == other.digest);
    assert_memory_equal(&stats, &other.stats, sizeof stats);
    for (int32_t h = 0; h < kKvHeads; ++h) assert_true(listed[h] == other.listed[h]);
  }
};

// A sequence whose calls are sometimes stopped, and a twin whose calls never are.
class Twins {
 public:
  explicit Twins(const Machine& machine) : pruned_(64, 128, some_stages()) {
    for (auto& each : keepers_) each = std::make_unique<Keeper>(machine, pruned_.options, short_pages());
  }
  const Keeper& kept() const { return *keepers_[0]; }
  const Keeper& twin() const { return *keepers_[1]; }

  // Returns whether the call was stopped.
  bool stop_by_flag(int64_t n_tokens, int64_t seed, std::chrono::microseconds after) {
    const State before(kept());
    Batch batch(kept().machine, 0, {{kept().ids[0], n_tokens}}, seed);
    const int32_t status = attend_with_flag(kept(), &batch, after);
    return has_stopped(status, before, n_tokens, seed, batch);
  }
  bool stop_by_progress(int64_t n_tokens, int64_t seed, int64_t at) {
    const State before(kept());
    Batch batch(kept().machine, 0, {{kept().ids[0], n_tokens}}, seed);
    batch.args.progress = stop_at;
    batch.args.progress_user = &at;
    const int32_t status = tandem_attend(kept().session, &batch.args, nullptr);
    return has_stopped(status, before, n_tokens, seed, batch);
  }
  void go_on(int64_t n_tokens, int64_t seed) {
    assert_same_bits(kept().turn({n_tokens}, seed), twin().turn({n_tokens}, seed), "call " + std::to_string(seed));
    State(kept()).expect_same(State(twin()));
  }

 private:
  // If the call was not stopped, the twin makes it too, and both truncate its tokens. Returns whether it was stopped.
  bool has_stopped(int32_t status, const State& before, int64_t n_tokens, int64_t seed, const Batch& batch) {
    if (status == TANDEM_ERROR_CANCELLED) {
      before.expect_same(State(kept()));
      return true;
    }
    assert_int_equal(status, TANDEM_OK);
    assert_same_bits(batch.answers(), twin().turn({n_tokens}, seed), "not stopped");
    for (const Keeper* each : {&kept(), &twin()})
      OK(tandem_sequence_truncate, each->cache, each->ids[0], each->length(each->ids[0]) - n_tokens);
    return false;
  }

  Pruned pruned_;
  std::unique_ptr<Keeper> keepers_[2];
};

std::chrono::microseconds time_of(const Keeper& keeper, int64_t n_tokens) {
  const Batch batch(keeper.machine, 0, {{keeper.ids[0], n_tokens}}, 3);
  const auto begin = Clock::now();
  OK(tandem_attend, keeper.session, &batch.args);
  const auto end = Clock::now();
  OK(tandem_sequence_truncate, keeper.cache, keeper.ids[0], keeper.length(keeper.ids[0]) - n_tokens);
  return std::chrono::duration_cast<std::chrono::microseconds>(end - begin);
}

// The stopped call and the next call have different tokens. The bounds of chunks must come from the next call's tokens.
void sweep(const Machine& machine, int64_t n_tokens, int n_moments) {
  Twins twins(machine);
  twins.go_on(1500, 10);
  int n_stopped = 0;
  const std::chrono::microseconds whole = time_of(twins.kept(), n_tokens);
  (void)twins.twin().turn({n_tokens}, 3);
  OK(tandem_sequence_truncate, twins.twin().cache, twins.twin().ids[0], 1500);
  int64_t seed = 100;
  for (int i = 0; i < n_moments; ++i) {
    const auto share = static_cast<double>(noise(i, n_tokens) + 0.5f);
    const auto after = std::chrono::microseconds(static_cast<int64_t>(share * static_cast<double>(whole.count())));
    n_stopped += twins.stop_by_flag(n_tokens, seed, i == 0 ? std::chrono::microseconds(0) : after);
    n_stopped += twins.stop_by_progress(n_tokens, seed + 10, i % 3);
    twins.go_on(n_tokens, i % 2 == 0 ? seed + 10 : seed + 20);
    for (int d = 0; d < 2; ++d) twins.go_on(1, seed + 30 + 10 * d);
    seed += 100;
  }
  print_message("%lld tokens: %d calls of %d were stopped\n", static_cast<long long>(n_tokens), n_stopped, 2 * n_moments);
  assert_true(n_stopped > n_moments / 3);  // at least those stopped at the first progress callback
}

void stops_appends(void**) {
  const Machine machine({plain_layer()}, 3);
  sweep(machine, 400, static_cast<int>(tandem::test::some_of(14)));
}
void stops_decode_calls(void**) {
  const Machine machine({plain_layer()}, 3);
  sweep(machine, 1, static_cast<int>(tandem::test::some_of(40)));
}

// If an append is stopped after its chunks got bounds, the bounds are discarded, whichever way the tokens are appended
// later.
void forgets_bounds_of_what_was_stopped(void**) {
  const Machine machine;
  for (const bool by_another : {false, true}) {
    Twins twins(machine);
    twins.go_on(700, 10);
    assert_true(twins.stop_by_progress(600, 100, 0));
    for (const Keeper* each : {&twins.kept(), &twins.twin()})
      if (by_another) each->append(each->ids[0], 600, 200);
    if (!by_another) twins.go_on(600, 200);
    for (int i = 0; i < 8; ++i) twins.go_on(1, 300 + 10 * i);
    twins.go_on(200, 500);
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(stops_appends),
      cmocka_unit_test(stops_decode_calls),
      cmocka_unit_test(forgets_bounds_of_what_was_stopped),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
