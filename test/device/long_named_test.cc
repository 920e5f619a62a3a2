// SPDX-License-Identifier: MIT
// Long appends whose queries name keys, on device tensors. Their chunks have lists of tiles. Of the keys outside the window,
// only units that some query names cross the bus. Outputs and listed keys are those of the same calls on host tensors.
// long_named_test [MODULE]: on the stand-in, or on the GPU of the CUDA module.
#include "device/selection_twins.h"
#include "one_in.h"

using namespace tandem_test;

namespace {

Setup long_setup(int32_t k_type, int64_t unit, int64_t n_idx, int64_t window, const char* route) {
  Setup setup;
  setup.k_type = k_type;
  setup.unit = unit;
  setup.n_idx = n_idx;
  setup.window = window;
  setup.route = route;
  return setup;
}

std::vector<Setup> long_setups() {
  std::vector<Setup> made = {
      long_setup(TANDEM_F32, 64, 4, 64, "stream"),  long_setup(TANDEM_BF16, 128, 2, 200, "stream"),
      long_setup(TANDEM_Q8_0, 256, 3, 0, "stream"), long_setup(TANDEM_F32, 64, 3, 4096, nullptr),
      long_setup(TANDEM_F16, 64, 5, 100, "host"),   long_setup(TANDEM_F32, 128, 9, 700, "stream"),
      long_setup(TANDEM_BF16, 64, 2, 64, "stream"),
  };
  made[1].shared = made[1].host_idx = true;
  made[2].any_order = true;
  made[3].sliding = 300;
  made[5].append_tokens = 600;
  made[5].has_learned = true;
  made[6].plus_window = true;  // no tiles: 512 tokens at a time
  return made;
}

void answers_are_those_of_host_tensors(void**) {
  tandem::test::TakesOneIn is_taken;
  int64_t seed = 1;
  for (const Setup& setup : long_setups()) {
    if (!is_taken()) continue;
    Twins twins(setup, static_cast<uint64_t>(seed));
    for (const std::array<int64_t, 2> n : {std::array<int64_t, 2>{800, 3}, {1, 1}, {530, 600}, {1, 2}})
      seed += 100, twins.attend_all(n, seed, true);
    twins.truncate(0, 700);
    twins.attend_all({530, 1}, seed += 100, true);
    twins.attend_all({520, 1}, seed += 100, false);
    twins.attend_all({1, 1}, seed += 100, true);
  }
}

// Keys of units that no query names are NaN and are not sent. Of 20 units outside the window the queries name three.
void other_units_are_not_read(void**) {
  constexpr int64_t kBefore = 2600, kAppended = 600, kUnit = 64;
  const std::vector<int32_t> named = {3, 17, 30, 38};
  Setup setup = long_setup(TANDEM_F32, kUnit, 4, 64, "stream");
  setup.sinks = 0;
  Twins twins(setup);
  const auto spoil = [&](NamedCall* call, int64_t first, int64_t n) {
    for (int64_t t = 0; t < n; ++t)
      if (std::find(named.begin(), named.end(), (first + t) / kUnit) == named.end())
        for (int64_t i = 0; i < int64_t{kHeads} * kDim; ++i)
          call->k.values[static_cast<size_t>(t * kHeads * kDim + i)] =
              call->v.values[static_cast<size_t>(t * kHeads * kDim + i)] = NAN;
  };
  NamedCall prompt({kBefore, 0}, 5), call({kAppended, 0}, 9);
  spoil(&prompt, 0, kBefore);
  spoil(&call, kBefore, kAppended);
  std::vector<int32_t> idx;
  for (int64_t row = 0; row < kAppended * kHeads; ++row)
    for (size_t i = 0; i < named.size(); ++i) idx.push_back(i < 3 || row % 5 == 0 ? named[i] : -1);
  call.view_idx(setup, idx);
  for (NamedCall* one : {&prompt, &call}) {
    one->to_device(true);
    const tandem_attend_args args = one->args(0, twins.on_device.ids);
    tandem_session_stats before = TANDEM_SESSION_STATS_INIT, after = TANDEM_SESSION_STATS_INIT;
    OK(tandem_session_get_stats, &before, twins.on_device.session);
    OK(tandem_attend, twins.on_device.session, &args);
    device->wait();
    one->read_back();
    OK(tandem_session_get_stats, &after, twins.on_device.session);
    if (one == &prompt) continue;
    assert_int_equal(after.streamed_kv_bytes - before.streamed_kv_bytes, 4 * kUnit * kHeads * kDim * 2 * 4);
    for (const float x : one->o.values) assert_true(std::isfinite(x));
  }
}

// For a long append, indices in device memory come to the host before anything else happens. So the call itself reports a
// wrong one.
void wrong_indices_are_told_at_once(void**) {
  Twins twins(long_setup(TANDEM_F32, 64, 3, 64, "stream"));
  twins.attend_all({700, 700}, 5, true);
  NamedCall call({600, 0}, 9);
  std::vector<int32_t> idx(600 * kHeads * 3, -1);
  for (size_t row = 0; row < 600 * kHeads; ++row) idx[3 * row] = static_cast<int32_t>(row % 10);
  idx[3 * 1001] = 999;
  call.view_idx(twins.setup, idx);
  call.to_device(true);
  const tandem_attend_args args = call.args(0, twins.on_device.ids);
  tandem_error* error = nullptr;
  const int32_t status = tandem_attend(twins.on_device.session, &args, &error);
  assert_refused(status, error, kInvalid, "selection.idx", "selection.idx[500, 1, 0] = 999");
  assert_int_equal(twins.length(0, 0), 700);
  twins.attend_all({600, 1}, 50, true);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) cuda_module = argv[1];
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(answers_are_those_of_host_tensors, forget),
      cmocka_unit_test_teardown(other_units_are_not_read, forget),
      cmocka_unit_test_teardown(wrong_indices_are_told_at_once, forget),
  };
  return cmocka_run_group_tests(tests, open_device, close_stand_in);
}
