// SPDX-License-Identifier: MIT
// Calls on device tensors whose keys the caller names, with indices in host or in device memory. Outputs are compared with
// the same calls on host tensors, which gate_test compares with the reference. Prompts, decode and guesses, with removals
// between them; wrong indices; failures; refusals.
// device_selection_test [MODULE]: on the stand-in, or on the GPU of the CUDA module.
#include "device/selection_twins.h"

using namespace tandem_test;

namespace {

// Prompts, appends that evict, decode calls, dense calls between them, truncations, removals and forks.
void answers_are_those_of_host_tensors(void**) {
  int64_t seed = 1;
  for (const Setup& setup : setups()) {
    Twins twins(setup, static_cast<uint64_t>(seed));
    for (const std::array<int64_t, 2> n :
         {std::array<int64_t, 2>{70, 3}, {1, 1}, {30, 150}, {1, 1}, {1, 0}, {5, 2}, {1, 1}, {1, 1}})
      seed += 100, twins.attend_all(n, seed, seed % 300 != 1);
    twins.truncate(0, 80);
    twins.attend_all({1, 1}, seed += 100, true);
    twins.fork(1);
    twins.attend_all({2, 1}, seed += 100, true);
    if (setup.rope == TANDEM_ROPE_HALVES || setup.sliding == 0) twins.remove(0, 20, 30);
    twins.attend_all({1, 1}, seed += 100, true);
    twins.attend_all({40, 2}, seed += 100, true);
  }
}

void guesses_see_what_they_name(void**) {
  int64_t seed = 1;
  for (Setup setup : setups()) {
    setup.sliding = 0;
    Twins twins(setup, static_cast<uint64_t>(seed) + 7);
    twins.guess(3, seed += 100, true);
    twins.attend_all({90, 70}, seed += 100, true);
    for (const bool as_tree : {true, false}) {
      twins.guess(7, seed += 100, as_tree);
      twins.attend_all({1, 1}, seed += 100, true);
    }
  }
}

// Values of keys that no row names are NaN, in the window and outside it.
void other_keys_are_not_read(void**) {
  Twins twins({TANDEM_F32, 64, 0, 1, 20});
  NamedCall prompt({200, 200}, 5);
  for (int64_t t = 0; t < 400; ++t)
    if (t % 3 != 0)
      for (int64_t i = 0; i < int64_t{kHeads} * kDim; ++i)
        prompt.k.values[static_cast<size_t>(t * kHeads * kDim + i)] =
            prompt.v.values[static_cast<size_t>(t * kHeads * kDim + i)] = NAN;
  prompt.to_device(false);
  const tandem_attend_args append = prompt.args(0, twins.on_device.ids);
  OK(tandem_attend, twins.on_device.session, &append);
  NamedCall query({1, 1}, 9);
  std::vector<int32_t> idx;
  for (int64_t row = 0; row < 2 * kHeads; ++row)
    for (int32_t i = 0; i < 20; ++i)
      idx.push_back(static_cast<int32_t>(row < kHeads ? 9 * i + 3 * row : 9 * i + 1 + 3 * (row % 2)));
  query.view_idx(twins.setup, idx);
  query.to_device(true);
  const tandem_attend_args args = query.args(0, twins.on_device.ids);
  OK(tandem_attend, twins.on_device.session, &args);
  device->wait();
  query.read_back();
  for (const float x : query.o.values) assert_true(std::isfinite(x));
}

struct Wrong {
  const char* what;
  const char* told;
  std::vector<int32_t> row;
};

// The row of a wrong index is NaN in its heads and everything else is right. The next call reports the index and does
// nothing.
void wrong_indices_are_told_later(void**) {
  const std::vector<Wrong> cases = {{"behind its own", "selection.idx[1, 0, 1] = 201", {5, 201, -1}},
                                    {"far away", "selection.idx[1, 0, 2] = 2147483647", {5, 6, INT32_MAX}},
                                    {"twice", "selection.idx[1, 0, 1] = 7", {7, 7, 190}},
                                    {"descends", "selection.idx[1, 0, 2] = 3", {180, 190, 3}},
                                    {"behind a pad", "selection.idx[1, 0, 2] = 9", {8, -1, 9}},
                                    {"below -1", "selection.idx[1, 0, 0] = -2", {-2, 5, 6}}};
  for (const Wrong& wrong : cases) {
    Twins twins({TANDEM_F32, 64, 0, 1, 3});
    twins.attend_all({200, 200}, 50, false);
    NamedCall there({1, 1}, 70), here({1, 1}, 70);
    std::vector<int32_t> idx = {1, 50, 180, 2, 3, 199, 4, 150, 160, 10, 20, -1};
    here.view_idx(twins.setup, idx);
    std::copy(wrong.row.begin(), wrong.row.end(), idx.begin() + 6);  // the second sequence's query, head 0
    there.view_idx(twins.setup, idx);
    there.to_device(true);
    const tandem_attend_args device_args = there.args(0, twins.on_device.ids), host_args = here.args(0, twins.on_host.ids);
    OK(tandem_attend, twins.on_device.session, &device_args);
    OK(tandem_attend, twins.on_host.session, &host_args);
    device->wait();
    there.read_back();
    for (size_t head = 0; head < size_t{2} * kHeads * kGroup; ++head) {
      const bool is_wrong = head / kGroup == kHeads;
      if (is_wrong != std::isnan(there.lse.values[head])) fail_msg("%s: lse of head %zu", wrong.what, head);
      for (size_t d = 0; d < kDim; ++d) {
        const float got = there.o.values[head * kDim + d];
        if (is_wrong ? !std::isnan(got) : std::fabs(got - here.o.values[head * kDim + d]) > 2e-5f)
          fail_msg("%s: o of head %zu is %g", wrong.what, head, static_cast<double>(got));
      }
    }
    tandem_error* error = nullptr;
    const int32_t got = tandem_attend(twins.on_device.session, &device_args, &error);
    assert_refused(got, error, kInvalid, "selection.idx", wrong.told);
    assert_int_equal(twins.length(1, 0), 201);
    twins.attend(0, {1, 1}, 90, true);
  }
}

// Calls that are refused at once, without effect.
void refuses(void**) {
  Twins twins({TANDEM_F32, 64, 0, 1, 3, false, false, false, true});
  twins.attend_all({20, 20}, 50, false);
  NamedCall call({1, 1}, 70);
  call.view_idx(twins.setup, {1, 2, 3, 2, 3, 21, 4, 5, 6, 1, 2, -1});
  call.to_device(false);
  const tandem_attend_args args = call.args(0, twins.on_device.ids);
  tandem_error* error = nullptr;
  int32_t got = tandem_attend(twins.on_device.session, &args, &error);
  assert_refused(got, error, kInvalid, "selection.idx", "selection.idx[0, 1, 2] = 21 names no token");
  twins.attend(0, {1, 1}, 90, true);
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.selection_indices = -1;
  tandem_session* session = nullptr;
  got = tandem_session_create(&session, twins.on_host.cache, &options, &error);
  assert_refused(got, error, kInvalid, "selection_indices", "selection_indices = -1");
}

// If a launch or the copy of the indices fails, nothing is appended and later calls are right.
void failures_leave_nothing(void**) {
  if (cuda_module != nullptr) return;
  for (const stand_in::Call failing : {stand_in::kNameKeys, stand_in::kCopy, stand_in::kAppend, stand_in::kAttend})
    for (const bool host_idx : {false, true}) {
      Setup setup;
      setup.host_idx = host_idx;
      Twins twins(setup);
      twins.attend_all({90, 60}, 50, true);
      NamedCall call({2, 1}, 70);
      call.view_idx(setup, twins.draw(0, {2, 1}));
      call.to_device(!host_idx);
      const tandem_attend_args args = call.args(0, twins.on_device.ids);
      controls.fail_call(failing, 1, TANDEM_ERROR_BACKEND);
      tandem_error* error = nullptr;
      assert_int_equal(tandem_attend(twins.on_device.session, &args, &error), TANDEM_ERROR_BACKEND);
      tandem_error_release(error);
      controls.fail_call(failing, INT64_MAX, TANDEM_OK);
      int64_t n = 0;
      OK(tandem_sequence_length, &n, twins.on_device.cache, twins.on_device.ids[0], 0);
      assert_int_equal(n, 90);
      twins.attend_all({2, 1}, 90, true);
    }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) cuda_module = argv[1];
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(answers_are_those_of_host_tensors, forget),
      cmocka_unit_test_teardown(guesses_see_what_they_name, forget),
      cmocka_unit_test_teardown(other_keys_are_not_read, forget),
      cmocka_unit_test_teardown(wrong_indices_are_told_later, forget),
      cmocka_unit_test_teardown(refuses, forget),
      cmocka_unit_test_teardown(failures_leave_nothing, forget),
  };
  return cmocka_run_group_tests(tests, open_device, close_stand_in);
}
