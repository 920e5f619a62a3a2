// SPDX-License-Identifier: MIT
// Several sessions at work on device tensors, and who waits for all of them.
#include <chrono>
#include <thread>

#include "device/step_runner.h"

using namespace tandem_test;

namespace {

constexpr int64_t kOneEach[] = {1, 1};
constexpr int64_t kDelay = 10'000'000;

// ---- tandem_engine_drain() ---------------------------------------------------------------------------------------------

void expect_timeout(tandem_engine* engine) {
  tandem_error* error = nullptr;
  assert_int_equal(tandem_engine_drain(engine, 1'000'000, &error), TANDEM_ERROR_TIMEOUT);
  assert_string_equal(tandem_error_field(error), "timeout_ns");
  assert_non_null(std::strstr(tandem_error_message(error), "timeout_ns = 1000000 has passed with calls on device tensors"));
  tandem_error_release(error);
}

// Of two sessions on two caches of an engine, whichever is later.
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
  for (int i = 0; i < 6; ++i) {
    if (i == 2) controls.set_delay(kDelay);
    attend(i % 2 == 0 ? side : beside, *calls[static_cast<size_t>(i)]);
  }
  expect_timeout(side.engine);
  OK(tandem_engine_drain, side.engine, -1);
  assert_int_equal(counts.n_appended - n_appended, 6);
  if (is_observed) assert_true(counts.n_observed - n_observed >= 5);  // the last is counted when the host has it already
  const auto begin = std::chrono::steady_clock::now();
  for (const Side* each : {&side, &beside}) assert_int_equal(each->length(), kPrompt + 2);
  OK(tandem_engine_drain, side.engine, 0);
  assert_true(std::chrono::steady_clock::now() - begin < std::chrono::nanoseconds(kDelay));
  controls.set_delay(0);
}

void drain_waits_for_calls(void**) {
  for (const char* policy : {"all", "hgca"}) wait_for_calls(policy);
}

// What is planned and not launched is not waited for until the step has ended.
void drain_waits_for_closed_steps(void**) {
  Runner runner(150, "hgca");
  runner.begin(kOneEach);
  OK(tandem_engine_drain, runner.side.engine, -1);
  const int64_t n_appended = counts.n_appended;
  controls.set_delay(kDelay);
  runner.attend_layers(kOneEach);
  runner.end();
  expect_timeout(runner.side.engine);
  OK(tandem_engine_drain, runner.side.engine, -1);
  assert_int_equal(counts.n_appended - n_appended, kStepLayers);
  controls.set_delay(0);
  // A part of it was done when it ended, and the rest never is.
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

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(drain_waits_for_calls, forget),
      cmocka_unit_test_teardown(drain_waits_for_closed_steps, forget),
      cmocka_unit_test_teardown(drain_does_not_wait_for_a_lost_device, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
