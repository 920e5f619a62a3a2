// SPDX-License-Identifier: MIT
// Policy "patterns" on device tensors: the same answers, keys and counts as on host tensors, in appends, decode calls,
// planned steps and the replays of a graph.
#include "device/pattern_twins.h"
#include "device/step_runner.h"

using namespace tandem_test;

namespace {

void answers_as_on_the_host(const std::vector<tandem_head_pattern>& heads) {
  const Patterned patterned(kQHeads, heads);
  Twins twins(patterned);
  for (const int64_t n : {30, 1, 1, 200, 1, 5, 2, 600, 1, 129, 1}) twins.attend(n);
  for (Side* each : {&twins.side, &twins.twin}) OK(tandem_sequence_truncate, each->cache, each->sequence, 700);
  for (const int64_t n : {1, 130, 1}) twins.attend(n);
  assert_true(twins.side.digest() == twins.twin.digest());
}

void calls_answer_as_on_the_host(void**) {
  answers_as_on_the_host(some_heads());
  answers_as_on_the_host(without_sinks());
  answers_as_on_the_host({kFull, kFull, kFull, kFull});
  answers_as_on_the_host(alike());
  assert_int_equal(counts.n_indexed, 0);
  answers_as_on_the_host(choosing());
  answers_as_on_the_host(more_choosing());
  assert_true(counts.n_indexed > 0);
  assert_in_range(counts.largest_list_rows, 1, 64);
  controls.take_long_lists();
  answers_as_on_the_host(some_heads());
  answers_as_on_the_host(choosing());
  assert_int_equal(counts.largest_list_rows, TANDEM_PATTERN_BLOCK);
  answers_as_on_the_host(alike());
  assert_int_equal(counts.largest_list_rows, TANDEM_PATTERN_BLOCK * kQHeads / kKvHeads);
}

// Appends that the device takes some thousands of tokens at a time.
void long_appends_answer_as_on_the_host(void**) {
  for (const auto& heads : {some_heads(), alike(), choosing()}) {
    Patterned patterned(kQHeads, heads);
    patterned.options.window_tokens = 12000;
    Twins twins(patterned);
    for (const int64_t n : {2700, 1, 700, 8300, 1}) twins.attend(n);
    assert_true(twins.side.digest() == twins.twin.digest());
  }
}

void planned_steps_answer_as_on_the_host(void**) {
  constexpr int64_t kOneEach[] = {1, 1};
  for (const auto& heads : {some_heads(), without_sinks(), choosing(), std::vector<tandem_head_pattern>(kQHeads, kFull)}) {
    const Patterned patterned(int64_t{kStepLayers} * kQHeads, heads);
    Runner planned(300), replayed(300);
    HostTwin twin(300, "all");
    for (Side* side : {&planned.side, &replayed.side, &twin.side}) change_session(side, patterned.options);
    for (int64_t step = 0; step < 6; ++step) {
      planned.run_step(step);
      replayed.set_inputs(step);
      replayed.begin(kOneEach);
      if (replayed.graph == nullptr) replayed.capture(kOneEach);
      assert_true(controls.launch(replayed.graph, replayed.stream));
      replayed.end();
      const std::vector<float> wanted = twin.run_step(step);
      assert_close_to(planned.outputs(), wanted, "step " + std::to_string(step));
      assert_close_to(replayed.outputs(), wanted, "replayed step " + std::to_string(step));
    }
  }
}

void sequences_of_any_order(void**) {
  for (const auto& heads : {some_heads(), choosing(), more_choosing()})
    for (const auto* calls : {&kBothKinds, &kAnyOrder}) attend_batches(Patterned(kQHeads, heads), *calls);
}

void what_is_refused(void**) {
  Patterned capped(kQHeads, {a_shape(4, 30)});
  capped.patterns.max_distance = 50;
  for (const int64_t n : {1, 100}) {
    Side rotating(true, "all", 0, 1, kWindow, TANDEM_ROPE_HALVES);
    change_session(&rotating, capped.options);
    Call of_capped(n, 1);
    of_capped.to_device();
    const tandem_attend_args capped_args = of_capped.args(rotating);
    tandem_error* refusal = nullptr;
    const int32_t got = tandem_attend(rotating.session, &capped_args, &refusal);
    assert_refused(got, refusal, TANDEM_ERROR_UNSUPPORTED, "q.device_type", "patterns.max_distance");
    assert_int_equal(rotating.length(), 0);
  }
  Side side(true);
  const Patterned chosen(kQHeads, choosing());
  change_session(&side, chosen.options);
  Call call(1, 1);
  call.to_device();
  tandem_attend_args args = call.args(side);
  args.flags = TANDEM_ATTEND_PARTIAL;
  tandem_error* error = nullptr;
  const int32_t status = tandem_attend(side.session, &args, &error);
  assert_refused(status, error, TANDEM_ERROR_UNSUPPORTED, "flags", "several queries");
  assert_int_equal(side.length(), 0);
}

// Lists that the device has made of an append give way to those of the next call.
void tells_no_keys_that_the_device_has_chosen(void**) {
  const Patterned patterned(kQHeads, choosing());
  Side side(true);
  change_session(&side, patterned.options);
  Call call(200, 1);
  call.to_device();
  const tandem_attend_args args = call.args(side);
  OK(tandem_attend, side.session, &args);
  int64_t n = 0;
  tandem_error* error = nullptr;
  const int32_t status = tandem_session_selection(nullptr, nullptr, 0, &n, side.session, side.sequence, 0, 0, 0, &error);
  assert_refused(status, error, TANDEM_ERROR_UNSUPPORTED, "sequence", "policy \"patterns\"");
}

// A call whose index or lists fail leaves the sequence as it was, and is made again.
void failures_take_all_back(void**) {
  const Patterned patterned(kQHeads, choosing());
  for (const stand_in::Call failing : {stand_in::kIndexPatterns, stand_in::kListPatterns}) {
    Twins twins(patterned);
    twins.attend(150);
    Call call(140, 7);
    call.to_device();
    const tandem_attend_args args = call.args(twins.side);
    controls.fail_call(failing, 1, TANDEM_ERROR_BACKEND);
    tandem_error* error = nullptr;
    const int32_t status = tandem_attend(twins.side.session, &args, &error);
    assert_refused(status, error, TANDEM_ERROR_BACKEND, "", "");
    assert_int_equal(twins.side.length(), 150);
    twins.attend(140);
    twins.attend(1);
  }
}

// The memory plan asks the functions that calls ask.
void expect_planned(const std::vector<tandem_head_pattern>& heads) {
  Patterned patterned(kQHeads, heads);
  patterned.options.window_tokens = 3000;
  patterned.options.append_tokens = 2000;
  Side side(true);
  change_session(&side, patterned.options);
  const int64_t kv_len = 2001;
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  OK(tandem_plan_memory, &plan, side.engine, side.model, &cache, &patterned.options, &kv_len, 1);
  for (const int64_t n : {2000, 1}) {
    Call call(n, n);
    call.to_device();
    const tandem_attend_args args = call.args(side);
    OK(tandem_attend, side.session, &args);
  }
  assert_held(side, plan);
}

void plans_what_is_held(void**) {
  expect_planned(some_heads());
  expect_planned(choosing());
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(calls_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(long_appends_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(planned_steps_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(sequences_of_any_order, forget),
      cmocka_unit_test_teardown(what_is_refused, forget),
      cmocka_unit_test_teardown(tells_no_keys_that_the_device_has_chosen, forget),
      cmocka_unit_test_teardown(failures_take_all_back, forget),
      cmocka_unit_test_teardown(plans_what_is_held, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
