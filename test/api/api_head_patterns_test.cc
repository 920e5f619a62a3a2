// SPDX-License-Identifier: MIT
// Policy "patterns" through the C ABI: storage types and scattered pages, rows and chunks, stopped calls, forks and
// truncation. py_patterns_test.py compares the keys of a pattern with a reference.
#include "patterned_world.h"

using namespace tandem_test;

namespace {

std::vector<tandem_head_pattern> some_patterns() {
  return {a_shape(20, 150), vertical_slash(30, 100), block_sparse(3), kFull};
}

constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};

// Each way to name all keys gives the result of policy "all", for every storage type and placement of pages.
void a_full_mask_is_dense(void**) {
  const Machine machine;
  const Patterned patterned(n_heads_of(machine.layers), {a_shape(0, 1 << 20), vertical_slash(1 << 20, 0),
                                                         vertical_slash(0, 1 << 20), block_sparse(1 << 20)});
  for (const int32_t type : kTypes) {
    const Keeper kept(machine, patterned.options, short_pages(type)), dense(machine, dense_options(), short_pages(type));
    for (const Keeper* each : {&kept, &dense}) each->scatter();
    int64_t seed = 10;
    for (const int64_t n : {300, 129, 2, 1, 500, 1}) {
      assert_close_to(kept.turn({n}, seed), dense.turn({n}, seed),
                      "type " + std::to_string(type) + ", " + std::to_string(n));
      seed += 10;
    }
  }
}

// The keys of a block do not depend on the storage type of its rows, and repeated calls give the same bits.
void types_attend_the_same_keys(void**) {
  const Machine machine;
  const Patterned patterned(n_heads_of(machine.layers), {a_shape(20, 150)});
  const auto keys_of = [&](int32_t type) {
    const Keeper kept(machine, patterned.options, short_pages(type));
    kept.scatter();
    (void)kept.turn({700}, 10);
    (void)kept.turn({300}, 20);
    return kept.listed(kept.ids[0]);
  };
  const std::vector<int64_t> keys = keys_of(TANDEM_F32);
  assert_int_equal(keys.front(), 0);
  assert_int_equal(keys[24], 700 + 256 + 1 - 150);  // the last block's first query sets the window's start
  assert_int_equal(keys.back(), 999);
  for (const int32_t type : kTypes) assert_true(keys_of(type) == keys);
  const Patterned mixed(n_heads_of(machine.layers), some_patterns());
  const Keeper kept(machine, mixed.options, short_pages()), twin(machine, mixed.options, short_pages());
  assert_same_bits(kept.turn({900}, 10), twin.turn({900}, 10), "twins");
}

// Forks see the same keys. A truncated sequence behaves like one that was never longer.
void forks_and_truncation(void**) {
  const Machine machine;
  const Patterned patterned(n_heads_of(machine.layers), some_patterns());
  Keeper kept(machine, patterned.options, short_pages()), twin(machine, patterned.options, short_pages());
  (void)kept.turn({600}, 10);
  (void)twin.turn({600}, 10);
  (void)kept.turn({200}, 20);
  OK(tandem_sequence_truncate, kept.cache, kept.ids[0], 600);
  int64_t fork = 0;
  OK(tandem_sequence_fork, &fork, kept.cache, kept.ids[0]);
  const std::vector<float> expected = twin.turn({333}, 30);
  assert_same_bits(kept.turn({333}, 30), expected, "cut");
  kept.ids[0] = fork;
  assert_same_bits(kept.turn({333}, 30), expected, "fork");
}

int32_t stop_at(int64_t, int64_t, void* user) { return (*static_cast<int64_t*>(user))-- == 0 ? 1 : 0; }

// A call that its progress callback stops changes nothing.
void stopped_calls_leave_nothing(void**) {
  const Machine machine({plain_layer()}, 3);
  const Patterned patterned(n_heads_of(machine.layers), some_patterns());
  const Keeper kept(machine, patterned.options, short_pages()), twin(machine, patterned.options, short_pages());
  (void)kept.turn({500}, 10);
  (void)twin.turn({500}, 10);
  int n_stopped = 0;
  for (int64_t at = 0; at < 6; ++at) {
    const tandem_session_stats before = kept.stats();
    const uint64_t digest = kept.digest(kept.ids[0]);
    int64_t left = at;
    Batch batch(machine, 0, {{kept.ids[0], 400}}, 100 + at);
    batch.args.progress = stop_at;
    batch.args.progress_user = &left;
    const int32_t status = tandem_attend(kept.session, &batch.args, nullptr);
    if (status == TANDEM_OK) {
      OK(tandem_sequence_truncate, kept.cache, kept.ids[0], 500);
      continue;
    }
    ++n_stopped;
    assert_int_equal(status, TANDEM_ERROR_CANCELLED);
    assert_true(digest == kept.digest(kept.ids[0]));
    const tandem_session_stats after = kept.stats();
    assert_memory_equal(&before, &after, sizeof before);
  }
  assert_true(n_stopped > 0);
  const int32_t flag = 1;
  Batch batch(machine, 0, {{kept.ids[0], 400}}, 99);
  batch.args.cancel = &flag;
  assert_int_equal(tandem_attend(kept.session, &batch.args, nullptr), TANDEM_ERROR_CANCELLED);
  assert_same_bits(kept.turn({400}, 20), twin.turn({400}, 20), "after calls that were stopped");
}

// Other layers may have other policies. A layer with a sliding window ignores patterns.
void layers_with_other_policies(void**) {
  std::vector<tandem_layer_options> layers(3, plain_layer());
  layers[1].sliding_window_tokens = 90;
  const Machine machine(layers);
  Patterned patterned(n_heads_of(machine.layers), {a_shape(4, 60)});
  const char* policies[] = {"patterns", "patterns", "all"};
  patterned.options.layer_policies = policies;
  patterned.options.n_layer_policies = 3;
  const Keeper kept(machine, patterned.options, short_pages()), dense(machine, dense_options(), short_pages());
  (void)kept.turn({400}, 10);
  (void)dense.turn({400}, 10);
  for (int32_t l = 0; l < 3; ++l) {
    int64_t pairs = -1, dense_pairs = -1;
    OK(tandem_session_pattern_pairs, &pairs, &dense_pairs, kept.session, l);
    assert_true(l == 0 ? pairs > 0 && pairs < dense_pairs : pairs == 0 && dense_pairs == 0);
    Batch one(machine, l, {{kept.ids[0], 50}}, 30), other(machine, l, {{dense.ids[0], 50}}, 30);
    OK(tandem_attend, kept.session, &one.args);
    OK(tandem_attend, dense.session, &other.args);
    assert_true((one.answers() == other.answers()) == (l > 0));
  }
}

void plans_no_memory_of_its_own(void**) {
  const Machine machine;
  const Patterned patterned(n_heads_of(machine.layers), some_patterns());
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const tandem_cache_options cache = short_pages();
  const int64_t kv_len = 5000;
  OK(tandem_plan_memory, &plan, machine.engine, machine.model, &cache, &patterned.options, &kv_len, 1);
  assert_int_equal(plan.host_session_bytes, 0);
  assert_int_equal(plan.judged_kv_bytes, 0);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(a_full_mask_is_dense),       cmocka_unit_test(types_attend_the_same_keys),
      cmocka_unit_test(forks_and_truncation),       cmocka_unit_test(stopped_calls_leave_nothing),
      cmocka_unit_test(layers_with_other_policies), cmocka_unit_test(plans_no_memory_of_its_own),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
