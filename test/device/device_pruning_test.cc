// SPDX-License-Identifier: MIT
// Policy "hip" in an engine with a device: calls on device tensors and steps on a stream are refused and leave nothing
// behind, calls on host tensors answer as in an engine without one, also after what another session has appended on the
// device.
#include "api/pruned_world.h"
#include "device/device_side.h"

using namespace tandem_test;

namespace {

std::vector<tandem_pruning_stage> some_stages() {
  return {stage_of(TANDEM_JUDGE_BOUNDS, 16, 96, 3), stage_of(TANDEM_JUDGE_EXACT, 8, 32, 2, 32)};
}

// Side by side: what is there is the same before and after.
struct Held {
  int64_t length;
  uint64_t digest;
  tandem_session_stats stats;
  explicit Held(const Side& side) : length(side.length()), digest(side.digest()), stats(side.stats()) {}
  void expect_same(const Side& side) const {
    const Held now(side);
    assert_true(length == now.length && digest == now.digest);
    assert_memory_equal(&stats, &now.stats, sizeof stats);
  }
};

void use_policy(Side* side, const Pruned& pruned) { change_session(side, pruned.options); }

void refuses_device_tensors(void**) {
  const Pruned pruned(16, kWindow, some_stages());
  Side side(true);
  use_policy(&side, pruned);
  Call prompt(kPrompt, 3);
  attend(side, prompt);
  const Held before(side);
  for (const int64_t n : {1, 5, 600}) {
    Call call(n, 30);
    call.to_device();
    for (const bool asks_again : {false, true}) {
      tandem_attend_args args = call.args(side);
      if (asks_again) args.k = args.v = nullptr;
      if (asks_again && n > kPrompt) continue;
      tandem_error* error = nullptr;
      const int32_t status = tandem_attend(side.session, &args, &error);
      assert_refused(status, error, TANDEM_ERROR_UNSUPPORTED, "q.device_type", "layer 0 has policy \"hip\"");
      before.expect_same(side);
    }
  }
}

void refuses_steps_on_streams(void**) {
  const Pruned pruned(16, kWindow, some_stages());
  Side side(true, "all", 0, 2);
  tandem_session_options options = pruned.options;
  const char* const policies[] = {"all", "hip"};
  options.layer_policies = policies;
  options.n_layer_policies = 2;
  change_session(&side, options);
  for (const int32_t layer : {0, 1}) {
    Call prompt(kPrompt, 3);
    attend(side, prompt, layer);
  }
  const Held before(side);
  void* const stream = controls.create_stream();
  const int64_t one = 1;
  tandem_error* error = nullptr;
  const int32_t status = tandem_step_begin(side.session, &side.sequence, &one, 1, stream, &error);
  assert_refused(status, error, TANDEM_ERROR_UNSUPPORTED, "stream", "layer 1 has policy \"hip\"");
  before.expect_same(side);
  assert_true(controls.destroy_stream(stream));
  // Without a stream there is nothing in its way.
  OK(tandem_step_begin, side.session, &side.sequence, &one, 1, nullptr);
  for (const int32_t layer : {0, 1}) {
    Call call(1, 40);
    attend(side, call, layer);
  }
  OK(tandem_step_end, side.session, nullptr);
  assert_int_equal(side.length(1), kPrompt + 1);
  // Layers that do not prune take device tensors.
  Call on_device(4, 50), on_host(4, 50);
  on_device.to_device();
  attend(side, on_device, 0);
  attend(side, on_host, 1);
  assert_int_equal(side.length(0), side.length(1));
}

void answers_host_tensors(void**) {
  const Pruned pruned(16, kWindow, some_stages());
  Side side(true), twin(false);
  for (Side* each : {&side, &twin}) use_policy(each, pruned);
  const tandem_session_options dense = Side::options_of("all");
  tandem_session *beside = nullptr, *beside_twin = nullptr;
  OK(tandem_session_create, &beside, side.cache, &dense);
  OK(tandem_session_create, &beside_twin, twin.cache, &dense);
  int64_t seed = 1;
  for (const int64_t n : {200, 1, 1, 70, 1, 300, 1, 1, 1, 1}) {
    Call own(n, seed), wanted(n, seed);
    attend(side, own);
    attend(twin, wanted);
    assert_same_bits(own.output(), wanted.output(), "call " + std::to_string(seed));
    Call on_device(n % 50, ++seed), on_host(n % 50, seed);  // the other session's
    on_device.to_device();
    const tandem_attend_args args = on_device.args(side), args_of_twin = on_host.args(twin);
    if (n % 50 > 0) OK(tandem_attend, beside, &args);
    if (n % 50 > 0) OK(tandem_attend, beside_twin, &args_of_twin);
    ++seed;
  }
  assert_true(side.digest() == twin.digest());
  tandem_session_release(beside);
  tandem_session_release(beside_twin);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(refuses_device_tensors, forget),
      cmocka_unit_test_teardown(refuses_steps_on_streams, forget),
      cmocka_unit_test_teardown(answers_host_tensors, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
