// SPDX-License-Identifier: MIT
// Steps that are planned for a stream. Calls one by one and replays of a graph give the same bits while lengths, pages and
// the host's part change. A step that is not done as planned is an error and does not hang.
#include "device/step_runner.h"

using namespace tandem_test;

namespace {

void compare_replays_with_calls(const char* policy) {
  Runner eager(150, policy), replayed(150, policy);
  constexpr int64_t kOneEach[] = {1, 1};
  for (int64_t step = 0; step < 200; ++step) {
    for (Runner* runner : {&eager, &replayed}) {
      runner->set_inputs(step);
      runner->begin(kOneEach);
      if (runner == &eager)
        runner->attend_layers(kOneEach);
      else {
        if (runner->graph == nullptr) runner->capture(kOneEach);
        assert_true(controls.launch(runner->graph, runner->stream));
      }
      runner->end();
    }
    const std::vector<float> a = eager.outputs(), b = replayed.outputs();
    if (a.size() != b.size() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) != 0)
      fail_msg("other bits in step %lld", static_cast<long long>(step));
  }
  for (int i = 0; i < 2; ++i) assert_true(eager.digest(i) == replayed.digest(i));
  assert_int_equal(replayed.side.length(2), 150 + 200);
  const tandem_session_stats stats = replayed.side.stats();
  assert_true(stats.evicted_tokens > 0);
  assert_int_equal(stats.selected_keys, eager.side.stats().selected_keys);
  if (std::strcmp(policy, "hgca") == 0) {
    assert_true(stats.n_refreshes > kStepLayers * 10);
    if (stats.selected_keys == 0 || stats.selected_keys >= stats.host_keys)
      fail_msg("%lld of %lld keys are selected", static_cast<long long>(stats.selected_keys),
               static_cast<long long>(stats.host_keys));
  }
}

void replays_are_as_calls(void**) { compare_replays_with_calls("all"); }
// The selection changes during the steps.
void replays_select_as_calls(void**) { compare_replays_with_calls("hgca"); }

// Planned or not, on a device or not, the numbers are the same.
void compare_with_host(const char* policy) {
  Runner planned(150, policy);
  Side twin(false, policy, 0, kStepLayers);
  for (int32_t l = 0; l < kStepLayers; ++l) {
    const Tensor k({150, kKvHeads, kDim}, 100 + l), v({150, kKvHeads, kDim}, 200 + l);
    OK(tandem_sequence_append, twin.cache, twin.sequence, l, &k.view, &v.view, nullptr);
  }
  constexpr int64_t kTwoAndNone[] = {2, 0};
  for (int64_t step = 0; step < 40; ++step) {
    planned.set_inputs(step);
    planned.begin(kTwoAndNone);
    planned.attend_layers(kTwoAndNone);
    planned.end();
    for (int32_t l = 0; l < kStepLayers; ++l) {
      Call call(kTwo, 1000 + 10 * step + l);
      attend(twin, call, l);
      planned.outputs();
      assert_close(planned.calls[static_cast<size_t>(l)]->output(), call.output());
    }
  }
}

void planned_steps_are_right(void**) { compare_with_host("all"); }
void planned_steps_select_right(void**) { compare_with_host("hgca"); }

// Steps are counted modulo 256. Memory that is allocated in the second half of a round must not look as if its steps had
// ended.
void memory_may_grow_between_steps(void**) {
  constexpr int64_t kMore = 40, kOneEach[] = {1, 1};
  Runner runner(20);
  for (int64_t step = 0; step < 150; ++step) {
    runner.begin(kOneEach);
    runner.attend_layers(kOneEach);
    runner.end();
  }
  for (int32_t l = 0; l < kStepLayers; ++l) {
    Call call(kMore, l);
    call.to_device();
    attend(runner.side, call, l, runner.stream);
    runner.outputs();
  }
  controls.set_delay(5'000'000);
  runner.begin(kOneEach);
  runner.attend_layers(kOneEach);
  runner.end();
  runner.digest(0);
  controls.set_delay(0);
  assert_int_equal(runner.side.length(2), 20 + 150 + kMore + 1);
}

void expect_refused(const Runner& runner, const tandem_attend_args& args, int32_t status, const char* field) {
  tandem_error* error = nullptr;
  assert_int_equal(tandem_attend(runner.side.session, &args, &error), status);
  assert_string_equal(tandem_error_field(error), field);
  tandem_error_release(error);
}

void refuses_what_was_not_planned(void**) {
  Runner runner(20);
  constexpr int64_t kOneEach[] = {1, 1}, kOther[] = {2, 0};
  runner.begin(kOneEach);
  expect_refused(runner, runner.args(1, kOneEach), TANDEM_ERROR_INVALID_STATE, "layer_idx");
  expect_refused(runner, runner.args(0, kOther), TANDEM_ERROR_INVALID_STATE, "sequences");
  tandem_attend_args args = runner.args(0, kOneEach);
  args.k = args.v = nullptr;
  expect_refused(runner, args, TANDEM_ERROR_INVALID_STATE, "k");
  args = runner.args(0, kOneEach);
  args.flags = TANDEM_ATTEND_SPECULATIVE;
  expect_refused(runner, args, TANDEM_ERROR_INVALID_STATE, "flags");
  args.flags = TANDEM_ATTEND_PARTIAL;
  expect_refused(runner, args, TANDEM_ERROR_INVALID_STATE, "flags");
  args = runner.args(0, kOneEach);
  void* other = controls.create_stream();
  args.stream = other;
  expect_refused(runner, args, TANDEM_ERROR_INVALID_STATE, "stream");
  for (void* stream : {other, static_cast<void*>(nullptr)}) {
    tandem_error* error = nullptr;
    const int32_t status = tandem_step_end(runner.side.session, stream, &error);
    assert_refused(status, error, TANDEM_ERROR_INVALID_STATE, "stream", "the step was begun on");
  }
  assert_true(controls.destroy_stream(other));
  Call on_host(kTwo, 1);
  args = runner.args(0, kOneEach);
  args.q = &on_host.q.view, args.k = &on_host.k.view, args.v = &on_host.v.view, args.o = &on_host.o.view;
  args.stream = nullptr;
  expect_refused(runner, args, TANDEM_ERROR_INVALID_STATE, "q.device_type");
  uint64_t digest = 0;
  tandem_error* error = nullptr;
  assert_int_equal(tandem_sequence_digest(&digest, runner.side.cache, runner.ids[0], &error), TANDEM_ERROR_BUSY);
  tandem_error_release(error);
  runner.attend_layers(kOneEach);
  expect_refused(runner, runner.args(3 - 1, kOneEach), TANDEM_ERROR_INVALID_STATE, "layer_idx");
  runner.end();
  runner.digest(0);
}

// Steps without sequences, or with sequences that would be too long.
void refuses_steps_that_cannot_be(void**) {
  const Runner runner(20);
  constexpr int64_t kTooMany[] = {1, INT32_MAX};
  tandem_error* error = nullptr;
  assert_int_equal(tandem_step_begin(runner.side.session, runner.ids, kTooMany, 0, runner.stream, &error),
                   TANDEM_ERROR_INVALID_ARGUMENT);
  assert_string_equal(tandem_error_field(error), "n_sequences");
  tandem_error_release(error);
  error = nullptr;
  assert_int_equal(tandem_step_begin(runner.side.session, runner.ids, kTooMany, 2, runner.stream, &error),
                   TANDEM_ERROR_CAPACITY);
  assert_string_equal(tandem_error_field(error), "q_lens[1]");
  tandem_error_release(error);
}

// Refreshes that an open step has posted end with the session.
void a_session_may_end_in_a_step(void**) {
  constexpr int64_t kOneEach[] = {1, 1};
  for (int round = 0; round < 30; ++round) {
    Runner runner(150, "hgca");
    runner.set_inputs(1);
    runner.begin(kOneEach);
    int64_t n_kept = 0;
    tandem_error* error = nullptr;
    assert_int_equal(
        tandem_session_selection(nullptr, nullptr, 0, &n_kept, runner.side.session, runner.ids[0], 0, 0, 0, &error),
        TANDEM_ERROR_BUSY);
    tandem_error_release(error);
    runner.attend_layers(kOneEach);
    runner.outputs();
    tandem_session_release(runner.side.session);
    runner.side.session = nullptr;
  }
}

// A graph that is never replayed: the sequences are as before the step, and the session reports what happened.
void a_step_that_stays_undone_is_taken_back(void**) {
  for (const int32_t n_done : {0, 2}) {
    Runner runner(20);
    constexpr int64_t kOneEach[] = {1, 1};
    const uint64_t before = runner.digest(0);
    runner.set_inputs(1);
    runner.begin(kOneEach);
    runner.attend_layers(kOneEach, n_done);
    runner.end();
    assert_true(runner.digest(0) == before);
    for (int32_t l = 0; l < kStepLayers; ++l) assert_int_equal(runner.side.length(l), 20);
    tandem_error* error = nullptr;
    assert_int_equal(tandem_step_begin(runner.side.session, runner.ids, kOneEach, 2, runner.stream, &error),
                     TANDEM_ERROR_INVALID_STATE);
    assert_non_null(std::strstr(tandem_error_message(error), n_done == 0 ? "before layer 0" : "before layer 2"));
    tandem_error_release(error);
  }
}

// The capture limits the steps that a graph can serve.
void graphs_are_not_outgrown(void**) {
  Runner runner(20);
  constexpr int64_t kOneEach[] = {1, 1}, kMore[] = {30, 30};
  runner.begin(kOneEach);
  runner.capture(kOneEach);
  assert_true(controls.launch(runner.graph, runner.stream));
  runner.end();
  tandem_error* error = nullptr;
  assert_int_equal(tandem_step_begin(runner.side.session, runner.ids, kMore, 2, runner.stream, &error),
                   TANDEM_ERROR_CAPACITY);
  tandem_error_release(error);
  assert_int_equal(runner.side.length(), 21);
}

// A step has up to 1,024 sequences, although calls are cut into parts of 512.
void steps_have_many_sequences(void**) {
  constexpr int64_t kMany = 1024;
  const Side side(true), twin(false);
  std::vector<int64_t> ids = {side.sequence}, twins = {twin.sequence};
  while (std::ssize(ids) <= kMany) {
    int64_t id = 0;
    OK(tandem_sequence_create, &id, side.cache);
    ids.push_back(id);
    OK(tandem_sequence_create, &id, twin.cache);
    twins.push_back(id);
  }
  const std::vector<int64_t> ones(ids.size(), 1);
  void* stream = controls.create_stream();
  tandem_error* error = nullptr;
  const int32_t got = tandem_step_begin(side.session, ids.data(), ones.data(), kMany + 1, stream, &error);
  assert_refused(got, error, TANDEM_ERROR_CAPACITY, "q_lens", "takes 512 of 1024");
  for (int64_t step = 0; step < 3; ++step) {
    Call call(kMany, 10 * step), here(kMany, 10 * step);
    call.to_device();
    OK(tandem_step_begin, side.session, ids.data(), ones.data(), kMany, stream);
    tandem_attend_args args = call.args(side), host_args = here.args(twin);
    args.n_sequences = host_args.n_sequences = kMany;
    args.q_lens = host_args.q_lens = ones.data();
    args.sequences = ids.data();
    args.stream = stream;
    host_args.sequences = twins.data();
    OK(tandem_attend, side.session, &args);
    OK(tandem_step_end, side.session, stream);
    OK(tandem_attend, twin.session, &host_args);
    tandem::DeviceError device_error;
    device->must(device->table->wait(device->self, stream, &device_error), device_error);
    assert_close(call.output(), here.output());
  }
  assert_true(controls.destroy_stream(stream));
}

// A graph that is replayed twice leaves tickets that no call waits for. The next step finds them and does not take them for
// its own.
void a_graph_replayed_twice_is_noticed(void**) {
  Runner runner(20);
  constexpr int64_t kOneEach[] = {1, 1};
  runner.begin(kOneEach);
  runner.capture(kOneEach);
  for (int i = 0; i < 2; ++i) assert_true(controls.launch(runner.graph, runner.stream));
  runner.end();
  const uint64_t before = runner.digest(0);
  runner.begin(kOneEach);
  assert_true(controls.launch(runner.graph, runner.stream));
  runner.end();
  assert_true(runner.digest(0) == before);
  tandem_error* error = nullptr;
  assert_int_equal(tandem_step_begin(runner.side.session, runner.ids, kOneEach, 2, runner.stream, &error),
                   TANDEM_ERROR_INVALID_STATE);
  assert_non_null(std::strstr(tandem_error_message(error), "replayed twice"));
  tandem_error_release(error);
  assert_int_equal(runner.side.length(), 21);
}

// Returns the memory plan of steps with one token of each of the runner's sequences.
tandem_memory_plan plan_of_steps(const char* policy) {
  const Runner runner(150, policy);
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const tandem_session_options options = Side::options_of(policy);
  const int64_t kv_lens[] = {151, 181};
  OK(tandem_plan_memory, &plan, runner.side.engine, runner.side.model, nullptr, &options, kv_lens, 2);
  return plan;
}

// With a cap of exactly the plan, steps have room and use all of it. begin: makes the first calls.
template <typename Begin>
void fill_the_cap(const char* policy, Begin begin) {
  constexpr int64_t kOneEach[] = {1, 1};
  const tandem_memory_plan plan = plan_of_steps(policy);
  const int64_t cap = plan.device_window_bytes + plan.device_work_bytes;
  for (const int64_t missing : {0, 1}) {
    Runner runner(150, policy, cap - missing);
    const int64_t device_before = controls.device_bytes(), shared_before = controls.shared_bytes();
    assert_int_equal(begin(&runner), missing == 0 ? TANDEM_OK : TANDEM_ERROR_CAPACITY);
    if (missing > 0) continue;
    for (int64_t step = 0; step < 3; ++step) {
      runner.begin(kOneEach);
      runner.attend_layers(kOneEach);
      runner.end();
    }
    tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
    OK(tandem_cache_get_stats, &stats, runner.side.cache);
    assert_int_equal(stats.device_window_bytes, plan.device_window_bytes);
    assert_int_equal(stats.device_work_bytes, plan.device_work_bytes);
    assert_int_equal(stats.device_peak_bytes, cap);
    assert_int_equal(controls.device_bytes() - device_before, cap);
    constexpr int64_t kStaging = 2 * (int64_t{16} << 20);  // pinned host memory for filling windows
    assert_int_equal(controls.shared_bytes() - shared_before + kStaging, plan.shared_bytes);
  }
}

// Begins a step, attends nothing, and rolls the step back.
int32_t begin_step(const Runner& runner, int32_t n_sequences) {
  constexpr int64_t kOneEach[] = {1, 1};
  const auto begin = [&] {
    return tandem_step_begin(runner.side.session, runner.ids, kOneEach, n_sequences, runner.stream, nullptr);
  };
  const int32_t status = begin();
  if (status != TANDEM_OK) return status;
  OK(tandem_step_end, runner.side.session, runner.stream);
  OK(tandem_engine_drain, runner.side.engine, -1);
  assert_int_equal(begin(), TANDEM_ERROR_INVALID_STATE);
  return TANDEM_OK;
}

// Whether or not a step is the first call, and however many sequences came before, it takes the planned memory.
void steps_take_what_is_planned(void**) {
  for (const char* policy : {"all", "streaming", "hgca"}) {
    fill_the_cap(policy, [](Runner* runner) { return begin_step(*runner, 2); });
    fill_the_cap(policy, [](Runner* runner) {
      constexpr int64_t kOneEach[] = {1, 1};
      const tandem_attend_args args = runner->args(0, kOneEach);
      const int32_t status = tandem_attend(runner->side.session, &args, nullptr);
      for (int i = 0; i < 2; ++i) OK(tandem_sequence_truncate, runner->side.cache, runner->ids[i], 150 + 30 * i);
      return status;
    });
    fill_the_cap(policy, [](Runner* runner) {
      const int32_t status = begin_step(*runner, 1);
      return status == TANDEM_OK ? begin_step(*runner, 2) : status;
    });
  }
}

void attend_as_twin(Runner* runner, const Side& twin, int64_t seed) {
  for (int32_t l = 0; l < kStepLayers; ++l) {
    Call call(1, seed + l), on_host(1, seed + l);
    call.to_device();
    attend(runner->side, call, l, runner->stream);
    attend(twin, on_host, l);
    runner->outputs();
    assert_close(call.output(), on_host.output());
  }
}

// Work space that cannot grow stays as it was. If the device then fails as well, the next call makes it anew.
void steps_without_room_change_nothing(void**) {
  for (const char* policy : {"all", "hgca"})
    for (const bool fails : {false, true}) {
      const tandem_memory_plan plan = plan_of_steps(policy);
      Runner runner(150, policy, plan.device_window_bytes + plan.device_work_bytes - 1);
      const HostTwin twin(150, policy);
      attend_as_twin(&runner, twin.side, 1);
      if (fails) controls.fail_call(stand_in::kFill, 1, TANDEM_ERROR_BACKEND);
      assert_int_equal(begin_step(runner, 2), TANDEM_ERROR_CAPACITY);
      for (int64_t step = 0; step < 10; ++step) attend_as_twin(&runner, twin.side, 10 * step);
      assert_int_equal(begin_step(runner, 1), TANDEM_OK);
    }
}

// Work space that was freed for a larger one, which the device then fails to make, is made anew by the next call.
void work_space_that_went_comes_back(void**) {
  const tandem_memory_plan plan = plan_of_steps("all");
  Runner runner(150, "all", plan.device_window_bytes + plan.device_work_bytes);
  const HostTwin twin(150, "all");
  assert_int_equal(begin_step(runner, 1), TANDEM_OK);
  attend_as_twin(&runner, twin.side, 1);
  controls.fail_call(stand_in::kFill, 1, TANDEM_ERROR_BACKEND);
  assert_int_equal(begin_step(runner, 2), TANDEM_ERROR_BACKEND);
  attend_as_twin(&runner, twin.side, 10);
  assert_int_equal(begin_step(runner, 2), TANDEM_OK);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(replays_are_as_calls, forget),
      cmocka_unit_test_teardown(replays_select_as_calls, forget),
      cmocka_unit_test_teardown(planned_steps_are_right, forget),
      cmocka_unit_test_teardown(planned_steps_select_right, forget),
      cmocka_unit_test_teardown(memory_may_grow_between_steps, forget),
      cmocka_unit_test_teardown(refuses_what_was_not_planned, forget),
      cmocka_unit_test_teardown(refuses_steps_that_cannot_be, forget),
      cmocka_unit_test_teardown(a_step_that_stays_undone_is_taken_back, forget),
      cmocka_unit_test_teardown(a_session_may_end_in_a_step, forget),
      cmocka_unit_test_teardown(graphs_are_not_outgrown, forget),
      cmocka_unit_test_teardown(steps_have_many_sequences, forget),
      cmocka_unit_test_teardown(steps_take_what_is_planned, forget),
      cmocka_unit_test_teardown(steps_without_room_change_nothing, forget),
      cmocka_unit_test_teardown(work_space_that_went_comes_back, forget),
      cmocka_unit_test_teardown(a_graph_replayed_twice_is_noticed, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
