// SPDX-License-Identifier: MIT
// Policy "patterns" on device tensors: outputs, keys and counts are those on host tensors, in appends, decode calls, planned
// steps and graph replays.
#include "device/pattern_twins.h"

using namespace tandem_test;

namespace {

void answers_as_on_the_host(const std::vector<tandem_head_pattern>& heads) { expect_same_calls(Patterned(kQHeads, heads)); }

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

void long_appends_answer_as_on_the_host(void**) {
  for (const auto& heads : {some_heads(), alike(), choosing()}) {
    Patterned patterned(kQHeads, heads);
    patterned.options.window_tokens = 12000;
    expect_same_long_appends(patterned);
  }
}

void planned_steps_answer_as_on_the_host(void**) {
  for (const auto& heads : {some_heads(), without_sinks(), choosing(), std::vector<tandem_head_pattern>(kQHeads, kFull)})
    expect_same_steps(Patterned(int64_t{kStepLayers} * kQHeads, heads));
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

// Lists that the device chose for an append are replaced by those of the next call.
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

void failures_take_all_back(void**) {
  const Patterned patterned(kQHeads, choosing());
  for (const stand_in::Call failing : {stand_in::kIndexPatterns, stand_in::kListPatterns})
    expect_taken_back(patterned, failing, 1);
}

void plans_what_is_held(void**) {
  for (const auto& heads : {some_heads(), choosing()}) {
    Patterned patterned(kQHeads, heads);
    patterned.options.window_tokens = 3000;
    patterned.options.append_tokens = 2000;
    expect_planned(patterned, {2000, 1});
  }
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
