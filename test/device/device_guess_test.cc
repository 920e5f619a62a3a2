// SPDX-License-Identifier: MIT
// Speculation on device tensors, beside a twin with host tensors: trees, the tokens that are kept, calls that fail, and a
// device that is lost during a guess.
#include "device/device_side.h"
#include "device/gate.h"

using namespace tandem_test;

namespace {

constexpr int32_t kParents[] = {-1, 0, 0, 1, -1, 2, 3};
constexpr int64_t kGuessed = 7;

int32_t guess(const Side& side, Call& call, bool is_tree) {
  tandem_attend_args args = call.args(side);
  args.flags = TANDEM_ATTEND_SPECULATIVE;
  args.parent_idx = is_tree ? kParents : nullptr;
  tandem_error* error = nullptr;
  const int32_t status = tandem_attend(side.session, &args, &error);
  tandem_error_release(error);
  return status;
}

void commit(const Side& side, const std::vector<int64_t>& kept) {
  OK(tandem_session_commit, side.session, side.sequence, kept.data(), static_cast<int64_t>(kept.size()));
}

void expect_same(const Side& side, const Side& twin) {
  uint64_t digest = 0, wanted = 0;
  OK(tandem_sequence_digest, &digest, side.cache, side.sequence);
  OK(tandem_sequence_digest, &wanted, twin.cache, twin.sequence);
  assert_true(digest == wanted);
  assert_int_equal(side.stats().evicted_tokens, twin.stats().evicted_tokens);
  assert_int_equal(side.stats().selected_keys, twin.stats().selected_keys);
}

void guess_as_twins(const Side& side, const Side& twin, int64_t seed, bool is_tree) {
  Call on_device(kGuessed, seed), on_host(kGuessed, seed);
  on_device.to_device();
  assert_int_equal(guess(side, on_device, is_tree), TANDEM_OK);
  assert_int_equal(guess(twin, on_host, is_tree), TANDEM_OK);
  assert_close(on_device.output(), on_host.output());
}

// Windows are short, so tokens are evicted meanwhile. Some guesses are dropped, and decode calls come between them.
void guesses_are_as_on_the_host(void**) {
  const std::vector<int64_t> chains[] = {{0, 2, 5}, {}, {0, 1, 3, 6}, {4}};
  for (const char* policy : {"all", "streaming", "hgca"}) {
    const Side side(true, policy), twin(false, policy);
    attend_twins(side, twin, kPrompt, 1);
    for (int64_t i = 0; i < 60; ++i) {
      const bool is_tree = i % 3 != 2;
      guess_as_twins(side, twin, 100 * i, is_tree);
      std::vector<int64_t> kept = chains[i % 4];
      if (!is_tree) kept = {0, 1, 2};
      for (const Side* one : {&side, &twin}) commit(*one, kept);
      expect_same(side, twin);
      if (i % 2 == 0) attend_twins(side, twin, 1, 100 * i + 50);
    }
    assert_true(twin.stats().evicted_tokens > 0);
    assert_int_equal(side.stats().n_device_attends, side.stats().n_attends);
  }
}

void calls_may_fail(void**) {
  for (const char* policy : {"all", "hgca"})
    for (const stand_in::Call failing : {stand_in::kCopy, stand_in::kAppend, stand_in::kAttend, stand_in::kMerge}) {
      const Side side(true, policy), twin(false, policy);
      attend_twins(side, twin, kPrompt, 1);
      Call call(kGuessed, 2);
      call.to_device();
      controls.fail_call(failing, 1, TANDEM_ERROR_BACKEND);
      assert_int_equal(guess(side, call, true), TANDEM_ERROR_BACKEND);
      guess_as_twins(side, twin, 3, true);
      for (const Side* one : {&side, &twin}) commit(*one, {0, 2});
      expect_same(side, twin);
      attend_twins(side, twin, 1, 4);
    }
}

// The device is lost with a guess that never arrived. The guess is gone, and the host goes on.
void loses_a_guess(void**) {
  for (const char* policy : {"all", "hgca"}) {
    const Side side(true, policy), twin(false, policy);
    attend_twins(side, twin, kPrompt, 1);
    guess_as_twins(side, twin, 5, true);  // memory grows, which may wait
    for (const Side* one : {&side, &twin}) commit(*one, {});
    Call late(kGuessed, 2);
    late.to_device();
    stand_in::Gate gate(controls);
    assert_int_equal(guess(side, late, true), TANDEM_OK);
    controls.lose_device();
    gate.open();
    tandem_error* error = nullptr;
    const int64_t kept = 0;
    assert_int_equal(tandem_session_commit(side.session, side.sequence, &kept, 1, &error), TANDEM_ERROR_INVALID_STATE);
    tandem_error_release(error);
    assert_int_equal(side.length(), kPrompt);
    Call on_side(kGuessed, 3), on_twin(kGuessed, 3);
    assert_int_equal(guess(side, on_side, true), TANDEM_OK);
    assert_int_equal(guess(twin, on_twin, true), TANDEM_OK);
    assert_close(on_side.output(), on_twin.output());
    for (const Side* one : {&side, &twin}) commit(*one, {0, 2});
    expect_same(side, twin);
    controls.reset();
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(guesses_are_as_on_the_host, forget),
      cmocka_unit_test_teardown(calls_may_fail, forget),
      cmocka_unit_test_teardown(loses_a_guess, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
