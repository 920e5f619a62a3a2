// SPDX-License-Identifier: MIT
// Keys that are rotated by a Walsh-Hadamard matrix before they are stored, on the stand-in. Calls on device tensors give the
// host's outputs and leave the same rows in the store, whichever route attends the keys outside the window.
#include "device/device_side.h"

using namespace tandem_test;

namespace {

constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_BF16, TANDEM_Q8_0, TANDEM_Q4_0};

// Gives the side a cache of rotated keys. 4-bit keys are rotated by default.
void rotate_keys(Side* side, int32_t k_type, const tandem_session_options& session_options) {
  tandem_session_release(side->session);
  tandem_cache_release(side->cache);
  side->session = nullptr;
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  options.k_type = k_type;
  options.k_rotation = k_type == TANDEM_Q4_0 ? TANDEM_ROTATION_DEFAULT : TANDEM_ROTATION_HADAMARD;
  OK(tandem_cache_create, &side->cache, side->engine, side->model, &options);
  OK(tandem_session_create, &side->session, side->cache, &session_options);
  OK(tandem_sequence_create, &side->sequence, side->cache);
}

struct Twins {
  Side side, twin;

  Twins(int32_t k_type, const char* policy, const char* route) : side(true), twin(false) {
    tandem_session_options options = Side::options_of(policy);
    rotate_keys(&twin, k_type, options);
    options.route = route;
    rotate_keys(&side, k_type, options);
  }
  void attend(int64_t n_tokens, int64_t seed) const { attend_twins(side, twin, n_tokens, seed); }
  void assert_same_rows() const { assert_true(side.digest() == twin.digest()); }
};

void calls_agree_with_the_host(void**) {
  for (const int32_t k_type : kTypes)
    for (const char* policy : {"all", "streaming", "hgca"}) {
      const Twins both(k_type, policy, "host");
      both.attend(kPrompt, 1);
      for (int64_t i = 0; i < 20; ++i) both.attend(i % 3 + 1, 10 + i);
      both.assert_same_rows();
      Call on_host(1, 90), twin(1, 90);  // the host goes on with the rows that the device appended
      attend(both.side, on_host);
      attend(both.twin, twin);
      assert_close(on_host.output(), twin.output());
      both.attend(2, 91);  // the device goes on with the host's rows
      both.assert_same_rows();
    }
}

void planned_steps_agree_with_the_host(void**) {
  constexpr int64_t kOne = 1;
  void* const stream = controls.create_stream();
  for (const int32_t k_type : kTypes) {
    const Twins both(k_type, "all", "host");
    both.attend(kPrompt, 1);
    for (int64_t i = 0; i < 3; ++i) {
      Call on_device(1, 10 + i), on_host(1, 10 + i);
      on_device.to_device();
      OK(tandem_step_begin, both.side.session, &both.side.sequence, &kOne, 1, stream);
      attend(both.side, on_device, kLayer, stream);
      OK(tandem_step_end, both.side.session, stream);
      tandem::DeviceError error;
      device->must(device->table->wait(device->self, stream, &error), error);
      attend(both.twin, on_host);
      assert_close(on_device.output(), on_host.output());
    }
    both.assert_same_rows();
  }
  assert_true(controls.destroy_stream(stream));
}

// Keys cross the bus as they are stored, and are attended with rotated queries, also in long appends.
void streamed_keys_agree_with_the_host(void**) {
  for (const int32_t k_type : kTypes) {
    const Twins both(k_type, "all", "stream");
    both.attend(kPrompt, 1);
    both.attend(1, 2);
    both.attend(700, 3);
    both.attend(1, 4);
    assert_true(both.side.stats().n_stream_parts > 0);
    assert_int_equal(both.side.stats().n_host_parts, 0);
    both.assert_same_rows();
  }
}

void guesses_agree_with_the_host(void**) {
  constexpr int64_t kKept[] = {0, 1};
  for (const char* policy : {"all", "hgca"}) {
    const Twins both(TANDEM_Q4_0, policy, "host");
    both.attend(kPrompt, 1);
    Call on_device(4, 20), on_host(4, 20);
    on_device.to_device();
    for (const auto& [one, call] : {std::pair{&both.side, &on_device}, std::pair{&both.twin, &on_host}}) {
      tandem_attend_args args = call->args(*one);
      args.flags = TANDEM_ATTEND_SPECULATIVE;
      OK(tandem_attend, one->session, &args);
    }
    assert_close(on_device.output(), on_host.output());
    for (const Side* one : {&both.side, &both.twin}) OK(tandem_session_commit, one->session, one->sequence, kKept, 2);
    both.attend(1, 30);
    both.assert_same_rows();
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(calls_agree_with_the_host, forget),
      cmocka_unit_test_teardown(planned_steps_agree_with_the_host, forget),
      cmocka_unit_test_teardown(streamed_keys_agree_with_the_host, forget),
      cmocka_unit_test_teardown(guesses_agree_with_the_host, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
