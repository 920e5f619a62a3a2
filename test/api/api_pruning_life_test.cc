// SPDX-License-Identifier: MIT
// The life of a cache under policy "hip": a second session, forks, truncations and removals between calls, and threads. The
// reference is a new session, whose bounds and lists come from the cache's content at that moment. Records that keep
// everything are compared with policy "all".
#include <thread>

#include "pruned_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kDescent = TANDEM_JUDGE_DESCENT, kBounds = TANDEM_JUDGE_BOUNDS, kExact = TANDEM_JUDGE_EXACT;

std::vector<tandem_layer_options> rotated_layers() {
  std::vector<tandem_layer_options> layers(2, plain_layer());
  layers[0].rope = TANDEM_ROPE_HALVES;
  layers[1].rope = TANDEM_ROPE_INTERLEAVED;
  return layers;
}

// Stages that run in every call, so that a list depends only on keys and queries.
std::vector<tandem_pruning_stage> fresh_stages() {
  return {stage_of(kBounds, 16, 160), stage_of(kDescent, 16, 96), stage_of(kBounds, 8, 64, 0, 32),
          stage_of(kExact, 4, 32, 0, 32)};
}

// A cache with sessions of policies "hip" and "all", and a comparison of each call.
struct Shared {
  Machine machine{rotated_layers()};
  const Pruned pruned{16, 64, fresh_stages()}, keeping{16, 64, keeping_stages(kBounds, kExact)};
  Keeper keeper{machine, pruned.options, short_pages(TANDEM_BF16), 2};
  tandem_session* whole = nullptr;  // a session whose stages keep everything
  int64_t seed = 1;

  Shared() {
    OK(tandem_session_create, &whole, keeper.cache, &keeping.options);
    (void)keeper.beside();
    keeper.scatter();
  }
  ~Shared() { tandem_session_release(whole); }
  Shared(const Shared&) = delete;

  // Attends n tokens with `session`, then queries the same stored tokens with `second`, and compares.
  void compare(tandem_session* session, tandem_session* second, int64_t id, int64_t n, bool bit_for_bit) {
    seed += 1000;
    for (int32_t l = 0; l < 2; ++l) {
      Batch batch(machine, l, {{id, n}}, seed + 100 * l);
      OK(tandem_attend, session, &batch.args);
      const std::vector<float> got = batch.answers();
      batch.ask_again();
      OK(tandem_attend, second, &batch.args);
      const std::string context = "call " + std::to_string(seed / 1000) + ", layer " + std::to_string(l);
      if (bit_for_bit)
        assert_same_bits(got, batch.answers(), context);
      else
        assert_close_to(got, batch.answers(), context);
    }
  }
  // Appends tokens under policy "hip" and compares with a new session.
  void prune(int64_t id, int64_t n) {
    tandem_session* fresh = nullptr;
    OK(tandem_session_create, &fresh, keeper.cache, &pruned.options);
    compare(keeper.session, fresh, id, n, true);
    tandem_session_release(fresh);
  }
  void keep(int64_t id, int64_t n) { compare(whole, keeper.dense, id, n, false); }
  void all(int64_t id, int64_t n) { compare(keeper.dense, keeper.dense, id, n, true); }
  void everybody(int64_t id) {
    for (const int64_t n : {1, 1, 40, 1, 1, 1, 1}) {
      prune(id, n);
      keep(id, n);
      all(id, n);
    }
  }
};

// Each of two sessions attends tokens that the other appended.
void sees_tokens_of_other_sessions(void**) {
  Shared shared;
  const int64_t id = shared.keeper.ids[0];
  shared.all(id, 150);
  shared.prune(id, 200);
  for (const int64_t n : {1, 2, 33, 1, 1, 1, 90, 1}) {
    shared.all(id, n);
    shared.prune(id, 1);
    shared.keep(id, 1);
    shared.keeper.append(id, n, shared.seed += 1000);
    shared.keep(id, 1);
    shared.prune(id, n);
  }
}

void follows_forks_and_truncations(void**) {
  Shared shared;
  const int64_t id = shared.keeper.ids[0];
  shared.prune(id, 500);
  shared.everybody(id);
  int64_t fork = 0;
  OK(tandem_sequence_fork, &fork, shared.keeper.cache, id);
  shared.everybody(fork);
  shared.everybody(id);
  for (const int64_t n : {451, 448, 300, 90, 70, 20, 3}) {
    OK(tandem_sequence_truncate, shared.keeper.cache, fork, n);
    shared.prune(fork, 1);
    shared.prune(fork, 57);
    shared.everybody(fork);
  }
  shared.everybody(id);
  OK(tandem_sequence_drop, shared.keeper.cache, fork);
  shared.everybody(id);
}

// After a removal the positions of later keys shift, and so do these keys under RoPE.
void follows_removals(void**) {
  Shared shared;
  const int64_t id = shared.keeper.ids[0];
  shared.prune(id, 600);
  shared.everybody(id);
  for (const int32_t shifts : {1, 0, 1})
    for (const auto& [first, n] : {std::pair<int64_t, int64_t>{300, 37}, {0, 16}, {120, 64}, {17, 1}}) {
      OK(tandem_sequence_remove, shared.keeper.cache, id, first, n, shifts);
      shared.everybody(id);
    }
  int64_t fork = 0;
  OK(tandem_sequence_fork, &fork, shared.keeper.cache, id);
  OK(tandem_sequence_remove, shared.keeper.cache, fork, 100, 50, 1);
  shared.everybody(fork);
  shared.everybody(id);
}

// Truncation discards the lists of a decode call whose tokens are gone.
void forgets_lists_with_their_tokens(void**) {
  const Machine machine;
  const Pruned pruned(16, 128, {stage_of(kExact, 8, 64, 32)});
  const Keeper keeper(machine, pruned.options, short_pages()), fresh(machine, pruned.options, short_pages());
  for (const Keeper* each : {&keeper, &fresh}) each->append(each->ids[0], 500, 10);
  for (int i = 0; i < 5; ++i) (void)keeper.turn({1}, 100 + 10 * i);
  OK(tandem_sequence_truncate, keeper.cache, keeper.ids[0], 500);
  for (int i = 0; i < 5; ++i) assert_same_bits(keeper.turn({1}, 300 + 10 * i), fresh.turn({1}, 300 + 10 * i), "truncated");
  OK(tandem_sequence_remove, keeper.cache, keeper.ids[0], 200, 20, 0);
  const Keeper later(machine, pruned.options, short_pages());
  for (const auto& [first, n] : {std::pair<int64_t, int64_t>{0, 200}, {220, 285}}) {
    Tensor k({n, kKvHeads, kDim}), v({n, kKvHeads, kDim});
    OK(tandem_sequence_read, &k.view, &v.view, fresh.cache, fresh.ids[0], 0, first);
    OK(tandem_sequence_append, later.cache, later.ids[0], 0, &k.view, &v.view, nullptr);
  }
  for (int i = 0; i < 5; ++i) assert_same_bits(keeper.turn({1}, 500 + 10 * i), later.turn({1}, 500 + 10 * i), "removed");
}

// Queries of stored tokens append nothing, so lists stay.
void keeps_lists_when_nothing_comes(void**) {
  const Machine machine;
  const Pruned pruned(16, 128, {stage_of(kExact, 8, 64, 32)});
  const Keeper keeper(machine, pruned.options, short_pages()), twin(machine, pruned.options, short_pages());
  for (const Keeper* each : {&keeper, &twin}) each->append(each->ids[0], 500, 10);
  for (int i = 0; i < 6; ++i) {
    assert_same_bits(keeper.turn({1}, 100 + 10 * i), twin.turn({1}, 100 + 10 * i), "lists");
    (void)keeper.turn({1 + i % 3 * 20}, 600 + 10 * i, false);
    assert_int_equal(keeper.stats().n_refreshes, 1);
  }
}

// ---- threads ----------------------------------------------------------------------------------------------------------

std::vector<float> talk(const Keeper& keeper, tandem_session* session, int64_t id, int64_t seed) {
  std::vector<float> all;
  for (const int64_t n : {200, 1, 1, 40, 1, 300, 1, 1, 1, 1})
    for (int32_t l = 0; l < static_cast<int32_t>(keeper.machine.layers.size()); ++l) {
      const Batch batch(keeper.machine, l, {{id, n}}, seed += 10);
      OK(tandem_attend, session, &batch.args);
      const auto answers = batch.answers();
      all.insert(all.end(), answers.begin(), answers.end());
    }
  return all;
}

// Two threads use one session each, on sequences of one cache. Its store grows under both.
void two_threads_prune_beside_each_other(void**) {
  const Machine machine(rotated_layers());
  const Pruned pruned(16, 64,
                      {stage_of(kBounds, 16, 160, 4), stage_of(kDescent, 16, 96, 2), stage_of(kExact, 4, 32, 1, 32)});
  const Keeper keeper(machine, pruned.options, short_pages(), 2), twin(machine, pruned.options, short_pages(), 2);
  tandem_session* second = nullptr;
  OK(tandem_session_create, &second, keeper.cache, &pruned.options);
  std::vector<float> answers[2];
  std::thread other([&] { answers[1] = talk(keeper, second, keeper.ids[1], 5000); });
  answers[0] = talk(keeper, keeper.session, keeper.ids[0], 1000);
  other.join();
  for (size_t i = 0; i < 2; ++i)
    assert_same_bits(answers[i], talk(twin, twin.session, twin.ids[i], i == 0 ? 1000 : 5000), "thread " + std::to_string(i));
  tandem_session_release(second);
}

void as_many_threads_as_there_are(void**) {
  tandem_layer_options layer = plain_layer();
  layer.n_q_heads = 6;
  tandem_pruning_stage last = stage_of(kExact, 8, 64, 2, 32);
  last.plus_next = 1;
  for (const int32_t shared_lists : {0, 1}) {
    Pruned pruned(32, 128, {stage_of(kBounds, 32, 512, 8), stage_of(kDescent, 16, 160, 4), last});
    pruned.pruning.shared_lists = shared_lists;
    std::vector<float> wanted;
    for (const int32_t n_threads : {1, 2, 3}) {
      const Machine machine({layer}, n_threads);
      const Keeper keeper(machine, pruned.options, short_pages(TANDEM_Q8_0), 2);
      std::vector<float> got;
      int64_t seed = 0;
      for (const auto& q_lens :
           std::vector<std::vector<int64_t>>{{900, 65}, {1, 64}, {1, 1}, {1, 1}, {130, 1}, {1, 700}, {1, 1}}) {
        const auto answers = keeper.turn(q_lens, seed += 10);
        got.insert(got.end(), answers.begin(), answers.end());
      }
      if (n_threads > 1) assert_same_bits(got, wanted, std::to_string(n_threads) + " threads");
      wanted = got;
    }
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(sees_tokens_of_other_sessions),
      cmocka_unit_test(follows_forks_and_truncations),
      cmocka_unit_test(follows_removals),
      cmocka_unit_test(forgets_lists_with_their_tokens),
      cmocka_unit_test(keeps_lists_when_nothing_comes),
      cmocka_unit_test(two_threads_prune_beside_each_other),
      cmocka_unit_test(as_many_threads_as_there_are),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
