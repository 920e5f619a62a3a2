// SPDX-License-Identifier: MIT
// Several sessions at work on device tensors, waits for all of them, and a device that is lost meanwhile.
#include <chrono>
#include <thread>

#include "device/gate.h"
#include "device/step_runner.h"

using namespace tandem_test;
using stand_in::Gate;

namespace {

constexpr int64_t kOneEach[] = {1, 1};
constexpr int64_t kDelay = 5'000'000;

// ---- tandem_engine_drain() ---------------------------------------------------------------------------------------------

void expect_timeout(tandem_engine* engine) {
  tandem_error* error = nullptr;
  assert_int_equal(tandem_engine_drain(engine, 1'000'000, &error), TANDEM_ERROR_TIMEOUT);
  assert_string_equal(tandem_error_field(error), "timeout_ns");
  assert_non_null(std::strstr(tandem_error_message(error), "timeout_ns = 1000000 has passed with calls on device tensors"));
  tandem_error_release(error);
}

// Two sessions on two caches of one engine: drain() waits for the later one.
void wait_for_calls(const char* policy) {
  const Side side(true, policy);
  const Side beside(side, policy);
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 6; ++i) {
    calls.push_back(std::make_unique<Call>(i < 2 ? kPrompt : 1, i));
    calls.back()->to_device();
  }
  const int64_t n_appended = counts.n_appended, n_observed = counts.n_observed;
  const bool is_observed = std::strcmp(policy, "hgca") == 0;
  for (int i = 0; i < 2; ++i) attend(i == 0 ? side : beside, *calls[static_cast<size_t>(i)]);
  controls.set_delay(kDelay);
  Gate gate(controls);
  for (int i = 2; i < 6; ++i) attend(i % 2 == 0 ? side : beside, *calls[static_cast<size_t>(i)]);
  expect_timeout(side.engine);
  gate.open();
  OK(tandem_engine_drain, side.engine, -1);
  assert_int_equal(counts.n_appended - n_appended, 6);
  if (is_observed) assert_true(counts.n_observed - n_observed >= 5);  // the last one is counted only after the host has it
  Gate other(controls);  // of another user: no session waits for the device any more
  for (const Side* each : {&side, &beside}) assert_int_equal(each->length(), kPrompt + 2);
  OK(tandem_engine_drain, side.engine, 0);
  assert_false(other.is_open());
  other.open();
  controls.set_delay(0);
}

void drain_waits_for_calls(void**) {
  for (const char* policy : {"all", "hgca"}) wait_for_calls(policy);
}

// Layers that are planned and not launched are not waited for until the step has ended.
void drain_waits_for_closed_steps(void**) {
  Runner runner(150, "hgca");
  runner.begin(kOneEach);
  OK(tandem_engine_drain, runner.side.engine, -1);
  const int64_t n_appended = counts.n_appended;
  controls.set_delay(kDelay);
  Gate gate(controls, runner.stream);
  runner.attend_layers(kOneEach);
  runner.end();
  expect_timeout(runner.side.engine);
  gate.open();
  OK(tandem_engine_drain, runner.side.engine, -1);
  assert_int_equal(counts.n_appended - n_appended, kStepLayers);
  controls.set_delay(0);
  // A part of this step was done when it ended. The rest never will be.
  runner.begin(kOneEach);
  runner.attend_layers(kOneEach, 1);
  runner.outputs();
  runner.end();
  OK(tandem_engine_drain, runner.side.engine, -1);
}

void drain_does_not_wait_for_a_lost_device(void**) {
  Runner runner(150);
  controls.set_delay(kDelay);
  runner.begin(kOneEach);
  runner.attend_layers(kOneEach);
  runner.end();
  controls.lose_device();
  OK(tandem_engine_drain, runner.side.engine, -1);
}

// ---- two sessions ------------------------------------------------------------------------------------------------------

// A second session and sequence on a cache.
struct Second {
  tandem_session* session = nullptr;
  int64_t sequence = 0;

  Second(const Side& side, const char* policy) {
    const tandem_session_options options = Side::options_of(policy);
    OK(tandem_session_create, &session, side.cache, &options);
    OK(tandem_sequence_create, &sequence, side.cache);
  }
  Second(const Second&) = delete;
  ~Second() { tandem_session_release(session); }
};

// One of two sessions, with its sequence.
struct Turn {
  const Side* side;
  tandem_session* session;
  int64_t sequence;
  void* stream;

  void attend(Call& call, int32_t layer) const {
    tandem_attend_args args = call.args(*side, layer);
    args.sequences = &sequence;
    args.stream = stream;
    OK(tandem_attend, session, &args);
  }
};

// Makes the same call on both sides: one call, or a planned step during which the other session may call (`between`).
template <typename F>
void take_turn(const Turn& turn, const Turn& twin_turn, int64_t n, int64_t seed, bool is_step, F between) {
  std::vector<std::unique_ptr<Call>> calls, twin_calls;
  for (int32_t l = 0; l < kStepLayers; ++l) {
    calls.push_back(std::make_unique<Call>(n, seed + 5 * l));
    calls.back()->to_device();
    twin_calls.push_back(std::make_unique<Call>(n, seed + 5 * l));
  }
  if (is_step) OK(tandem_step_begin, turn.session, &turn.sequence, &n, 1, turn.stream);
  for (int32_t l = 0; l < kStepLayers; ++l) {
    turn.attend(*calls[static_cast<size_t>(l)], l);
    if (l == 1) between();
  }
  if (is_step) OK(tandem_step_end, turn.session, turn.stream);
  wait_for(turn.stream);
  for (int32_t l = 0; l < kStepLayers; ++l) {
    twin_turn.attend(*twin_calls[static_cast<size_t>(l)], l);
    assert_close(calls[static_cast<size_t>(l)]->output(), twin_calls[static_cast<size_t>(l)]->output());
  }
}

void interleave(const char* policy, const char* second_policy) {
  const Side side(true, policy, 0, kStepLayers), twin(false, policy, 0, kStepLayers);
  const Second second(side, second_policy), second_twin(twin, second_policy);
  void* streams[] = {controls.create_stream(), controls.create_stream()};
  const Turn turns[] = {{&side, side.session, side.sequence, streams[0]},
                        {&side, second.session, second.sequence, streams[1]}};
  const Turn twin_turns[] = {{&twin, twin.session, twin.sequence, nullptr},
                             {&twin, second_twin.session, second_twin.sequence, nullptr}};
  const auto nothing = [] {};
  for (int i = 0; i < 2; ++i) take_turn(turns[i], twin_turns[i], 100 + 40 * i, 1000 * i, false, nothing);
  for (int64_t round = 0; round < 40; ++round) {
    const int64_t seed = 5000 + 100 * round, n = 1 + round % 2;
    const int first = static_cast<int>(round % 2), other = 1 - first;
    take_turn(turns[first], twin_turns[first], n, seed, round % 3 != 0,
              [&] { take_turn(turns[other], twin_turns[other], 1, seed + 50, round % 4 == 3, nothing); });
  }
  for (int i = 0; i < 2; ++i) {
    uint64_t digest = 0, wanted = 0;
    OK(tandem_sequence_digest, &digest, side.cache, turns[i].sequence);
    OK(tandem_sequence_digest, &wanted, twin.cache, twin_turns[i].sequence);
    assert_true(digest == wanted);
  }
  for (void* stream : streams) assert_true(controls.destroy_stream(stream));
}

void two_sessions_share_a_cache(void**) {
  interleave("all", "all");
  interleave("hgca", "hgca");
  interleave("streaming", "hgca");
}

// Two sessions, each with a thread and a cache of its own. Both wait for the same pool and worker.
void work_on_threads(const char* policy) {
  constexpr int kSteps = 60;
  const Side side(true, policy), beside(side, policy), twin(false, policy), twin_beside(twin, policy);
  const Side* const sides[] = {&side, &beside};
  const Side* const twins[] = {&twin, &twin_beside};
  std::vector<std::unique_ptr<Call>> calls[2];
  void* streams[] = {controls.create_stream(), controls.create_stream()};
  for (int i = 0; i < 2; ++i)
    for (int64_t c = 0; c < kSteps; ++c) {
      calls[i].push_back(std::make_unique<Call>(c == 0 ? kPrompt : 1 + c % 3, 1000 * i + 3 * c));
      calls[i].back()->to_device();
    }
  std::thread threads[2];
  for (int i = 0; i < 2; ++i)
    threads[i] = std::thread([&, i] {
      for (int64_t c = 0; c < kSteps; ++c) {
        Call& call = *calls[i][static_cast<size_t>(c)];
        const bool is_step = c % 4 == 3;
        if (is_step) OK(tandem_step_begin, sides[i]->session, &sides[i]->sequence, &call.n, 1, streams[i]);
        attend(*sides[i], call, kLayer, streams[i]);
        if (is_step) OK(tandem_step_end, sides[i]->session, streams[i]);
        if (c % 16 == 15) OK(tandem_engine_drain, side.engine, -1);
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 2; ++i) {
    wait_for(streams[i]);
    for (int64_t c = 0; c < kSteps; ++c) {
      Call on_host(c == 0 ? kPrompt : 1 + c % 3, 1000 * i + 3 * c);
      attend(*twins[i], on_host);
      assert_close(calls[i][static_cast<size_t>(c)]->output(), on_host.output());
    }
    assert_int_equal(sides[i]->length(), twins[i]->length());
    assert_true(controls.destroy_stream(streams[i]));
  }
}

void two_threads_share_an_engine(void**) {
  for (const char* policy : {"all", "hgca"}) work_on_threads(policy);
}

// ---- tandem_session_release() ------------------------------------------------------------------------------------------

// The release returns while the device is held, and other sessions go on with the cache. Later the calls run to their end.
void release_does_not_wait(const char* policy) {
  const int64_t n_allocated = counts.n_allocated - counts.n_released, n_shared = counts.n_shared - counts.n_unshared;
  Side side(true, policy), twin(false, policy);
  void* stream = controls.create_stream();
  std::unique_ptr<Gate> gate;
  for (const int64_t seed : {1, 2}) {
    Call call(seed == 1 ? kPrompt : 1, seed), on_host(call.n, seed);
    call.to_device();
    attend(twin, on_host);
    if (seed == 2) gate = std::make_unique<Gate>(controls, stream);
    attend(side, call, kLayer, stream);
    if (seed == 1) {  // memory grows, which may wait
      wait_for(stream);
      assert_close(call.output(), on_host.output());
      continue;
    }
    tandem_session_release(side.session);
    side.session = nullptr;
    int64_t other = 0;
    OK(tandem_sequence_create, &other, side.cache);
    assert_false(gate->is_open());
    tandem_error* error = nullptr;
    assert_int_equal(tandem_engine_drain(side.engine, 1'000'000, &error), TANDEM_ERROR_TIMEOUT);
    tandem_error_release(error);
    gate->open();
    uint64_t digest = 0, wanted = 0;
    OK(tandem_sequence_digest, &digest, side.cache, side.sequence);
    OK(tandem_sequence_digest, &wanted, twin.cache, twin.sequence);
    assert_true(digest == wanted);
    wait_for(stream);  // the tensors belong to the call
  }
  OK(tandem_engine_drain, side.engine, -1);
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, side.cache);
  assert_int_equal(stats.device_window_bytes + stats.device_work_bytes, 0);
  assert_int_equal(counts.n_allocated - counts.n_released, n_allocated);
  assert_int_equal(counts.n_shared - counts.n_unshared, n_shared);
  assert_true(controls.destroy_stream(stream));
}

void releases_do_not_wait(void**) {
  for (const char* policy : {"all", "hgca", "streaming"}) release_does_not_wait(policy);
}

// Released in an open step: nothing waits for the step. It counts as not begun, although its kernels have yet to run.
void an_open_step_goes_at_once(void**) {
  for (const char* policy : {"all", "hgca"}) {
    Runner runner(150, policy);
    runner.begin(kOneEach);
    runner.attend_layers(kOneEach);
    runner.end();
    const uint64_t before = runner.digest(0);
    Gate gate(controls, runner.stream);
    const Tensor k({1, kKvHeads, kDim}, 1), v({1, kKvHeads, kDim}, 2);
    runner.begin(kOneEach);
    runner.attend_layers(kOneEach);
    tandem_session_release(runner.side.session);
    runner.side.session = nullptr;
    assert_true(runner.digest(0) == before);
    OK(tandem_sequence_append, runner.side.cache, runner.ids[0], 0, &k.view, &v.view, nullptr);
    OK(tandem_sequence_truncate, runner.side.cache, runner.ids[0], 100);
    OK(tandem_sequence_drop, runner.side.cache, runner.ids[1]);
    assert_false(gate.is_open());
    gate.open();
    OK(tandem_engine_drain, runner.side.engine, -1);
  }
}

// Calls in flight keep everything that they need, even if all other references are gone.
void everything_may_be_released(void**) {
  void* stream = controls.create_stream();
  std::unique_ptr<Gate> gate;
  Call call(kPrompt, 1), next(1, 2);
  call.to_device();
  next.to_device();
  const int64_t n_closed = counts.n_closed;
  {
    const Side side(true, "hgca");
    attend(side, call, kLayer, stream);
    OK(tandem_engine_drain, side.engine, -1);
    gate = std::make_unique<Gate>(controls, stream);
    attend(side, next, kLayer, stream);
  }
  assert_false(gate->is_open());
  assert_int_equal(counts.n_closed, n_closed);
  gate->open();
  for (int i = 0; i < 60'000 && counts.n_closed == n_closed; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  assert_int_equal(counts.n_closed, n_closed + 1);
  assert_true(controls.destroy_stream(stream));
}

// ---- a device that goes away in a step ---------------------------------------------------------------------------------

// Loses the device after n_done layers of a step. Only tokens that arrived in all layers stay, so the step's tokens are gone
// from every layer.
void lose_in_a_step(const char* policy, int32_t n_done) {
  // MAW of the window's keys are lost with the device. Outputs are the twin's only if no selection depends on them.
  const int64_t prompt = std::strcmp(policy, "hgca") == 0 ? 40 : 150;
  Runner runner(prompt, policy);
  HostTwin twin(prompt, policy);
  runner.set_inputs(0);
  runner.begin(kOneEach);
  runner.attend_layers(kOneEach);
  runner.end();
  assert_close(runner.outputs(), twin.run_step(0));
  runner.begin(kOneEach);
  runner.attend_layers(kOneEach, n_done);
  runner.outputs();  // these layers have been done
  controls.lose_device();
  const tandem_attend_args args = runner.args(n_done, kOneEach);
  tandem_error* error = nullptr;
  assert_int_equal(tandem_attend(runner.side.session, &args, &error), TANDEM_ERROR_DEVICE_LOST);
  tandem_error_release(error);
  error = nullptr;
  const int32_t ended = tandem_step_end(runner.side.session, runner.stream, &error);
  assert_int_equal(ended, TANDEM_ERROR_DEVICE_LOST);
  tandem_error_release(error);
  for (int i = 0; i < 2; ++i) {
    uint64_t digest = 0, wanted = 0;
    OK(tandem_sequence_digest, &digest, runner.side.cache, runner.ids[i]);
    OK(tandem_sequence_digest, &wanted, twin.side.cache, twin.ids[i]);
    assert_true(digest == wanted);
    for (int32_t l = 0; l < kStepLayers; ++l) {
      int64_t length = 0;
      OK(tandem_sequence_length, &length, runner.side.cache, runner.ids[i], l);
      assert_int_equal(length, prompt + 30 * i + 1);
    }
  }
  for (int i = 0; i < 2; ++i) {
    error = nullptr;
    assert_int_equal(tandem_step_begin(runner.side.session, runner.ids, kOneEach, 2, runner.stream, &error),
                     TANDEM_ERROR_DEVICE_LOST);
    tandem_error_release(error);
  }
  // Goes on with host tensors, in a step and outside.
  for (const int64_t n : {1, 1, 5, 1}) {
    OK(tandem_step_begin, runner.side.session, runner.ids, &n, 1, nullptr);
    for (int32_t l = 0; l < kStepLayers; ++l) {
      Call call(n, 90 + l), wanted(n, 90 + l);
      attend(runner.side, call, l);
      attend(twin.side, wanted, l);
      assert_close(call.output(), wanted.output());
    }
    OK(tandem_step_end, runner.side.session, nullptr);
  }
}

void loses_the_device_in_a_step(void**) {
  for (int32_t n_done = 0; n_done < kStepLayers; ++n_done) lose_in_a_step("all", n_done), controls.reset();
}
void loses_the_device_in_a_step_that_selects(void**) {
  for (int32_t n_done = 0; n_done < kStepLayers; ++n_done) lose_in_a_step("hgca", n_done), controls.reset();
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(drain_waits_for_calls, forget),
      cmocka_unit_test_teardown(drain_waits_for_closed_steps, forget),
      cmocka_unit_test_teardown(drain_does_not_wait_for_a_lost_device, forget),
      cmocka_unit_test_teardown(two_sessions_share_a_cache, forget),
      cmocka_unit_test_teardown(two_threads_share_an_engine, forget),
      cmocka_unit_test_teardown(releases_do_not_wait, forget),
      cmocka_unit_test_teardown(an_open_step_goes_at_once, forget),
      cmocka_unit_test_teardown(everything_may_be_released, forget),
      cmocka_unit_test_teardown(loses_the_device_in_a_step, forget),
      cmocka_unit_test_teardown(loses_the_device_in_a_step_that_selects, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
