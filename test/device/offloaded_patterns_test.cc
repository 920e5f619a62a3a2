// SPDX-License-Identifier: MIT
// Policy "patterns" on device tensors where windows have the newest tokens alone: appends bring the keys of their layer to
// the device, and the CPU attends those of decode calls. The answers, keys and counts are those on host tensors.
#include "device/pattern_twins.h"
#include "device/step_runner.h"

using namespace tandem_test;

namespace {

const std::vector<std::vector<tandem_head_pattern>> kAllHeads = {some_heads(), without_sinks(), {kFull, kFull, kFull, kFull},
                                                                 alike(),      choosing(),      more_choosing()};

void answers_as_on_the_host(const std::vector<tandem_head_pattern>& heads, int64_t window_tokens) {
  Patterned patterned(kQHeads, heads);
  patterned.options.window_tokens = window_tokens;
  Twins twins(patterned);
  for (const int64_t n : {30, 1, 1, 200, 1, 5, 2, 600, 1, 129, 1}) twins.attend(n);
  for (Side* each : {&twins.side, &twins.twin}) OK(tandem_sequence_truncate, each->cache, each->sequence, 700);
  for (const int64_t n : {1, 130, 1, 1}) twins.attend(n);
  assert_true(twins.side.digest() == twins.twin.digest());
}

// A window of 12 tokens ends within a unit of 8, and within the sinks at first.
void calls_answer_as_on_the_host(void**) {
  for (const auto& heads : kAllHeads)
    for (const int64_t window_tokens : {0, 12, 64, 300}) answers_as_on_the_host(heads, window_tokens);
}

void long_appends_answer_as_on_the_host(void**) {
  for (const auto& heads : {some_heads(), alike(), choosing()}) {
    Patterned patterned(kQHeads, heads);
    patterned.options.window_tokens = 500;
    Twins twins(patterned);
    for (const int64_t n : {2700, 1, 700, 8300, 1}) twins.attend(n);
    assert_true(twins.side.digest() == twins.twin.digest());
  }
}

void batches_answer_as_on_the_host(void**) {
  for (const auto& heads : {some_heads(), choosing(), more_choosing()})
    for (const auto* calls : {&kBothKinds, &kAnyOrder}) {
      Patterned patterned(kQHeads, heads);
      patterned.options.window_tokens = 64;
      attend_batches(patterned, *calls);
    }
}

// Layers take turns with the buffers, and the host appends tokens in between, which windows lack then.
void rows_from_elsewhere_are_attended(void**) {
  Patterned patterned(kQHeads, choosing());
  patterned.options.window_tokens = 200;
  Twins twins(patterned);
  twins.attend(400);
  for (Side* each : {&twins.side, &twins.twin}) {
    const Call more(170, 77);
    const tandem_attend_args args = more.args(*each);
    OK(tandem_attend, each->session, &args);
  }
  for (const int64_t n : {150, 1, 3}) twins.attend(n);
}

void planned_steps_answer_as_on_the_host(void**) {
  constexpr int64_t kOneEach[] = {1, 1};
  for (const auto& heads : kAllHeads)
    for (const int64_t window_tokens : {12, 64}) {
      Patterned patterned(int64_t{kStepLayers} * kQHeads, heads);
      patterned.options.window_tokens = window_tokens;
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

// Of heads with sinks and a window the tokens between these stay on the host. One KV head of two attends all keys.
void only_named_keys_are_brought(void**) {
  constexpr int64_t kBefore = 2000, kRow = 2 * kDim * 2;  // K and V of a KV head
  const auto brought_by = [](const std::vector<tandem_head_pattern>& heads) {
    Patterned patterned(kQHeads, heads);
    patterned.options.window_tokens = 64;
    Twins twins(patterned);
    for (int64_t n = 0; n < kBefore; n += 500) twins.attend(500);
    const int64_t before = twins.side.stats().filled_kv_bytes;
    twins.attend(100);
    return twins.side.stats().filled_kv_bytes - before;
  };
  const int64_t all = brought_by({kFull, kFull, kFull, kFull});
  assert_in_range(all, 2 * (kBefore - 64 - 128) * kRow, 2 * kBefore * kRow);  // the window has the others
  assert_in_range(brought_by({a_shape(20, 200), kFull, a_shape(20, 200), a_shape(9, 150)}), all / 2,
                  all / 2 + (24 + 200) * kRow);
  assert_in_range(brought_by({a_shape(20, 200), a_shape(0, 20), a_shape(20, 200), a_shape(9, 150)}), 1,
                  2 * (24 + 200) * kRow);
}

void failures_take_all_back(void**) {
  Patterned patterned(kQHeads, choosing());
  patterned.options.window_tokens = 64;
  for (const stand_in::Call failing :
       {stand_in::kIndexPatterns, stand_in::kListPatterns, stand_in::kCopyStrided, stand_in::kAppend}) {
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

// The sequence may go while its keys are on their way.
void a_sequence_may_go_at_once(void**) {
  Patterned patterned(kQHeads, choosing());
  patterned.options.window_tokens = 64;
  Twins twins(patterned);
  twins.attend(700);
  Call call(140, 7);
  call.to_device();
  const tandem_attend_args args = call.args(twins.side);
  OK(tandem_attend, twins.side.session, &args);
  OK(tandem_sequence_drop, twins.side.cache, twins.side.sequence);
  int64_t n = -1;
  assert_int_equal(tandem_sequence_length(&n, twins.side.cache, twins.side.sequence, 0, nullptr), TANDEM_ERROR_NOT_FOUND);
}

void assert_refuses(const Side& side, const tandem_attend_args& args) {
  const int64_t before = side.length();
  tandem_error* error = nullptr;
  const int32_t status = tandem_attend(side.session, &args, &error);
  assert_refused(status, error, TANDEM_ERROR_CAPACITY, "window_tokens", "policy \"patterns\"");
  assert_int_equal(side.length(), before);
}

// Windows have keys rotated, the store has not; and queries of tokens that are there bring nothing.
void what_is_refused(void**) {
  Patterned patterned(kQHeads, choosing());
  patterned.options.window_tokens = 64;
  Side rotated(true, "all", 0, 1, kWindow, TANDEM_ROPE_HALVES), side(true);
  Call call(100, 1);
  call.to_device();
  change_session(&rotated, patterned.options);
  assert_refuses(rotated, call.args(rotated));
  change_session(&side, patterned.options);
  tandem_attend_args args = call.args(side);
  OK(tandem_attend, side.session, &args);
  args.k = args.v = nullptr;
  assert_refuses(side, args);
}

void plans_what_is_held(void**) {
  for (const auto& heads : {some_heads(), choosing()}) {
    Patterned patterned(kQHeads, heads);
    patterned.options.window_tokens = 300;
    patterned.options.append_tokens = 1000;
    Side side(true);
    change_session(&side, patterned.options);
    const int64_t kv_len = 3001;
    tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
    const tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
    OK(tandem_plan_memory, &plan, side.engine, side.model, &cache, &patterned.options, &kv_len, 1);
    assert_true(plan.device_stream_bytes > 0);
    for (const int64_t n : {1000, 1000, 1000, 1}) {
      Call call(n, n);
      call.to_device();
      const tandem_attend_args args = call.args(side);
      OK(tandem_attend, side.session, &args);
    }
    assert_held(side, plan);
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(calls_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(long_appends_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(batches_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(rows_from_elsewhere_are_attended, forget),
      cmocka_unit_test_teardown(planned_steps_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(only_named_keys_are_brought, forget),
      cmocka_unit_test_teardown(failures_take_all_back, forget),
      cmocka_unit_test_teardown(a_sequence_may_go_at_once, forget),
      cmocka_unit_test_teardown(what_is_refused, forget),
      cmocka_unit_test_teardown(plans_what_is_held, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
