// SPDX-License-Identifier: MIT
// After a step that was not done as planned, the error is reported once. Then the session goes on with the graph that it
// has, and its outputs are those of a host that got the same calls.
#include <chrono>

#include "device/gate.h"
#include "device/step_runner.h"

using namespace tandem_test;

namespace {

constexpr int64_t kOneEach[] = {1, 1};
constexpr int64_t kPromptLen = 150;

// Waits until the host knows of the fault, and asserts that it is reported once. text: part of the message.
void expect_fault(Runner* runner, const char* text, int32_t status = TANDEM_ERROR_INVALID_STATE) {
  OK(tandem_engine_drain, runner->side.engine, -1);
  tandem_error* error = nullptr;
  assert_int_equal(tandem_step_begin(runner->side.session, runner->ids, kOneEach, 2, runner->stream, &error), status);
  if (std::strstr(tandem_error_message(error), text) == nullptr) fail_msg("\"%s\"", tandem_error_message(error));
  tandem_error_release(error);
}

void replay(Runner* runner) {
  runner->begin(kOneEach);
  if (runner->graph == nullptr) runner->capture(kOneEach);
  assert_true(controls.launch(runner->graph, runner->stream));
  runner->end();
}

void replay(Runner* runner, int64_t step) {
  runner->set_inputs(step);
  replay(runner);
}

void replay_as_twin(Runner* runner, HostTwin* twin, int64_t step) {
  replay(runner, step);
  assert_close(runner->outputs(), twin->run_step(step));
}

void leave_undone(Runner* runner, int64_t step, int32_t n_done) {
  runner->set_inputs(step);
  runner->begin(kOneEach);
  runner->attend_layers(kOneEach, n_done);
  runner->end();
}

void expect_same(Runner* runner, HostTwin* twin) {
  for (int i = 0; i < 2; ++i) {
    uint64_t digest = 0;
    OK(tandem_sequence_digest, &digest, twin->side.cache, twin->ids[i]);
    assert_true(runner->digest(i) == digest);
  }
}

// After a wait for the device, the lengths are those of the tokens that remain.
void lengths_are_those_that_remain(void**) {
  for (int32_t n_done = 0; n_done < kStepLayers; ++n_done) {
    Runner runner(kPromptLen);
    leave_undone(&runner, 1, n_done);
    OK(tandem_engine_drain, runner.side.engine, -1);
    for (int i = 0; i < 2; ++i)
      for (int32_t l = 0; l < kStepLayers; ++l) {
        int64_t n = 0;
        OK(tandem_sequence_length, &n, runner.side.cache, runner.ids[i], l);
        assert_int_equal(n, kPromptLen + 30 * i);
      }
  }
}

// Begins every step twice and leaves it undone the first time, so that this also happens while tokens leave the window.
void recover_often(const char* policy) {
  Runner runner(kPromptLen, policy);
  HostTwin twin(kPromptLen, policy);
  for (int64_t step = 0; step < 4; ++step) replay_as_twin(&runner, &twin, step);
  for (int64_t step = 4; step < 80; ++step) {
    const auto n_done = static_cast<int32_t>(step % kStepLayers);
    leave_undone(&runner, 1000 + step, n_done);
    twin.leave_undone(1000 + step, n_done);
    if (step % 2 == 0) expect_same(&runner, &twin);  // else the next step rolls it back
    expect_fault(&runner, "a step ended before layer");
    replay_as_twin(&runner, &twin, step);
  }
  expect_same(&runner, &twin);
  const tandem_session_stats stats = runner.side.stats(), wanted = twin.side.stats();
  assert_true(stats.evicted_tokens > 0);
  assert_int_equal(stats.evicted_tokens, wanted.evicted_tokens);
  assert_int_equal(stats.selected_keys, wanted.selected_keys);
}

void undone_steps_are_made_up_for(void**) { recover_often("all"); }
void undone_steps_are_made_up_for_that_select(void**) { recover_often("hgca"); }

// Sequences are longer at the undone step than the calls before it left them. The averages of the tokens that left the
// window meanwhile are the host's, and stay.
void undone_steps_may_find_more_tokens(void**) {
  Runner runner(kPromptLen, "hgca");
  HostTwin twin(kPromptLen, "hgca");
  for (int64_t step = 0; step < 60; ++step) {
    replay_as_twin(&runner, &twin, step);
    if (step % 10 != 5) continue;
    for (int32_t l = 0; l < kStepLayers; ++l)
      for (int i = 0; i < 2; ++i) {
        const Tensor k({20, kKvHeads, kDim}, 500 + step + l), v({20, kKvHeads, kDim}, 600 + step + l);
        OK(tandem_sequence_append, runner.side.cache, runner.ids[i], l, &k.view, &v.view, nullptr);
        OK(tandem_sequence_append, twin.side.cache, twin.ids[i], l, &k.view, &v.view, nullptr);
      }
    leave_undone(&runner, 1000 + step, 0);
    twin.leave_undone(1000 + step, 0);
    expect_same(&runner, &twin);
    expect_fault(&runner, "a step ended before layer");
  }
  assert_int_equal(runner.side.stats().selected_keys, twin.side.stats().selected_keys);
}

// No call waits for a ticket that came once too often, although the host has parts in it. Such a wait would last 30 s.
void recover_from_a_second_replay(const char* policy) {
  auto begin = std::chrono::steady_clock::now();
  const auto expect_no_wait = [&begin] {
    const auto now = std::chrono::steady_clock::now();
    assert_true(now - begin < std::chrono::seconds(25));
    begin = now;
  };
  Runner runner(kPromptLen, policy);
  HostTwin twin(kPromptLen, policy);
  for (int64_t step = 0; step < 30; ++step) {
    replay_as_twin(&runner, &twin, 2 * step);
    runner.set_inputs(2 * step + 1);
    assert_true(controls.launch(runner.graph, runner.stream));
    replay(&runner);
    expect_fault(&runner, "replayed twice");
    expect_same(&runner, &twin);
    expect_no_wait();
    if (std::strcmp(policy, "all") == 0) continue;
    break;  // weights were counted twice, so selections may differ from here on
  }
  replay(&runner, 100);
  runner.outputs();
  assert_int_equal(*controls.fault(), '\0');
  OK(tandem_step_begin, runner.side.session, runner.ids, kOneEach, 2, runner.stream);
  runner.attend_layers(kOneEach);
  runner.end();
  expect_no_wait();
}

void second_replays_are_got_over(void**) { recover_from_a_second_replay("all"); }
void second_replays_are_got_over_that_select(void**) { recover_from_a_second_replay("hgca"); }

// The replay comes after the step has been rolled back.
void late_replays_are_got_over(void**) {
  for (const char* policy : {"all", "hgca"}) {
    Runner runner(kPromptLen, policy);
    HostTwin twin(kPromptLen, policy);
    for (int64_t step = 0; step < 20; ++step) {
      replay_as_twin(&runner, &twin, step);
      leave_undone(&runner, 1000 + step, 0);
      expect_same(&runner, &twin);
      assert_true(controls.launch(runner.graph, runner.stream));
      expect_fault(&runner, "before layer 0");
    }
  }
}

// A call outside of steps also gets the report, and the next one works.
void calls_recover(void**) {
  for (const char* policy : {"all", "hgca"}) {
    Runner runner(kPromptLen, policy);
    HostTwin twin(kPromptLen, policy);
    replay_as_twin(&runner, &twin, 0);
    leave_undone(&runner, 1, 1);
    twin.leave_undone(1, 1);
    runner.digest(0);
    for (int32_t l = 0; l < kStepLayers; ++l) {
      Call call(3, 7 * l), on_host(3, 7 * l);
      call.to_device();
      tandem_attend_args args = call.args(runner.side, l);
      tandem_error* error = nullptr;
      if (l == 0) assert_int_equal(tandem_attend(runner.side.session, &args, &error), TANDEM_ERROR_INVALID_STATE);
      tandem_error_release(error);
      OK(tandem_attend, runner.side.session, &args);
      attend(twin.side, on_host, l);
      assert_close(call.output(), on_host.output());
    }
    replay_as_twin(&runner, &twin, 2);
  }
}

// A step begins before the fault of the step before it is known. Its calls fail, it ends, and the next step gets the report.
void steps_behind_it_are_taken_back(void**) {
  Runner runner(kPromptLen);
  HostTwin twin(kPromptLen, "all");
  replay_as_twin(&runner, &twin, 0);
  stand_in::Gate gate(controls, runner.stream);
  leave_undone(&runner, 1, 2);
  runner.begin(kOneEach);
  assert_true(controls.launch(runner.graph, runner.stream));
  runner.end();
  gate.open();
  expect_same(&runner, &twin);
  expect_fault(&runner, "");
  replay_as_twin(&runner, &twin, 2);
}

void a_lost_device_stays_lost(void**) {
  Runner runner(kPromptLen);
  replay(&runner, 0);
  runner.outputs();
  leave_undone(&runner, 1, 1);
  controls.lose_device();
  runner.digest(0);
  for (int i = 0; i < 3; ++i) expect_fault(&runner, "", TANDEM_ERROR_DEVICE_LOST);
}

// When a session is released in an open step, the tokens of the step are rolled back, whether they were sent or not.
void open_steps_go_with_their_session(void**) {
  for (int32_t n_done = 0; n_done <= kStepLayers; ++n_done) {
    Runner runner(kPromptLen);
    HostTwin twin(kPromptLen, "all");
    replay_as_twin(&runner, &twin, 0);
    runner.begin(kOneEach);
    runner.attend_layers(kOneEach, n_done);
    tandem_session_release(runner.side.session);
    expect_same(&runner, &twin);
    const tandem_session_options options = Side::options_of("all");
    OK(tandem_session_create, &runner.side.session, runner.side.cache, &options);
    runner.set_inputs(1);
    runner.begin(kOneEach);
    runner.attend_layers(kOneEach);
    runner.end();
    assert_close(runner.outputs(), twin.run_step(1));
  }
}

void expect_no_end(Runner* runner, int32_t status, const char* text) {
  tandem_error* error = nullptr;
  assert_int_equal(tandem_step_end(runner->side.session, runner->stream, &error), status);
  if (std::strstr(tandem_error_message(error), text) == nullptr) fail_msg("\"%s\"", tandem_error_message(error));
  tandem_error_release(error);
}

// If the call of a layer fails after its rows were sent, everything that the host waits for may still come. The step is
// rolled back all the same. Its graph, if there is one, works in later steps.
void a_layer_fails_half_way(stand_in::Call failing, int32_t layer, bool has_graph) {
  Runner runner(kPromptLen);
  HostTwin twin(kPromptLen, "all");
  if (has_graph) replay_as_twin(&runner, &twin, 0);
  runner.set_inputs(1);
  runner.begin(kOneEach);
  runner.attend_layers(kOneEach, layer);
  const tandem_attend_args args = runner.args(layer, kOneEach);
  controls.fail_call(failing, 1, TANDEM_ERROR_BACKEND);
  tandem_error* error = nullptr;
  assert_int_equal(tandem_attend(runner.side.session, &args, &error), TANDEM_ERROR_BACKEND);
  tandem_error_release(error);
  const int32_t again = tandem_attend(runner.side.session, &args, &error);
  assert_refused(again, error, TANDEM_ERROR_INVALID_STATE, "layer_idx", "of the step has failed");
  const bool is_last = layer == kStepLayers - 1;
  expect_no_end(&runner, TANDEM_ERROR_INVALID_STATE, is_last ? "layer 2 of the step has failed" : "before layer");
  expect_same(&runner, &twin);
  if (!is_last) expect_fault(&runner, "before layer");
  for (int64_t step = 2; step < 5; ++step) replay_as_twin(&runner, &twin, step);
  expect_same(&runner, &twin);
}

void layers_fail_half_way(void**) {
  for (const stand_in::Call failing : {stand_in::kAttend, stand_in::kMerge})
    for (int32_t layer = 0; layer < kStepLayers; ++layer)
      for (const bool has_graph : {false, true}) a_layer_fails_half_way(failing, layer, has_graph);
}

// A layer whose call failed before its rows were sent can be called again.
void layers_are_called_again(void**) {
  Runner runner(kPromptLen);
  HostTwin twin(kPromptLen, "all");
  runner.set_inputs(0);
  runner.begin(kOneEach);
  const tandem_attend_args args = runner.args(0, kOneEach);
  controls.fail_call(stand_in::kAppend, 1, TANDEM_ERROR_BACKEND);
  tandem_error* error = nullptr;
  assert_int_equal(tandem_attend(runner.side.session, &args, &error), TANDEM_ERROR_BACKEND);
  tandem_error_release(error);
  runner.attend_layers(kOneEach);
  runner.end();
  assert_close(runner.outputs(), twin.run_step(0));
  expect_same(&runner, &twin);
}

// If a stream refuses an event the step stays open. It can be ended later, when the stream takes one.
void steps_end_where_they_can(void**) {
  Runner runner(kPromptLen);
  HostTwin twin(kPromptLen, "all");
  runner.set_inputs(0);
  runner.begin(kOneEach);
  assert_true(controls.begin_capture(runner.stream));
  runner.attend_layers(kOneEach);
  expect_no_end(&runner, TANDEM_ERROR_INVALID_STATE, "is being captured: steps end outside");
  runner.graph = controls.end_capture(runner.stream);
  assert_true(controls.launch(runner.graph, runner.stream));
  controls.fail_call(stand_in::kFill, 1, TANDEM_ERROR_BACKEND);
  expect_no_end(&runner, TANDEM_ERROR_BACKEND, "as the test has asked");
  runner.end();
  assert_close(runner.outputs(), twin.run_step(0));
  replay_as_twin(&runner, &twin, 1);
  runner.begin(kOneEach);
  controls.lose_device();
  expect_no_end(&runner, TANDEM_ERROR_DEVICE_LOST, "");
  expect_no_end(&runner, TANDEM_ERROR_INVALID_STATE, "no step is open");
  expect_same(&runner, &twin);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(lengths_are_those_that_remain, forget),
      cmocka_unit_test_teardown(undone_steps_are_made_up_for, forget),
      cmocka_unit_test_teardown(undone_steps_are_made_up_for_that_select, forget),
      cmocka_unit_test_teardown(undone_steps_may_find_more_tokens, forget),
      cmocka_unit_test_teardown(second_replays_are_got_over, forget),
      cmocka_unit_test_teardown(second_replays_are_got_over_that_select, forget),
      cmocka_unit_test_teardown(late_replays_are_got_over, forget),
      cmocka_unit_test_teardown(calls_recover, forget),
      cmocka_unit_test_teardown(steps_behind_it_are_taken_back, forget),
      cmocka_unit_test_teardown(a_lost_device_stays_lost, forget),
      cmocka_unit_test_teardown(open_steps_go_with_their_session, forget),
      cmocka_unit_test_teardown(layers_fail_half_way, forget),
      cmocka_unit_test_teardown(layers_are_called_again, forget),
      cmocka_unit_test_teardown(steps_end_where_they_can, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
