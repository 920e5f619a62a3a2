// SPDX-License-Identifier: MIT
// Planned steps on a GPU: replays of a graph give the bits of single calls, while windows evict, selections change and
// sequences grow.
#include "hybrid_case.h"
#include "with_cmocka.h"

using namespace tandem::test;

namespace {

constexpr int32_t kLayers = 3;
constexpr int kSteps = 200;

tandem_engine* engine = nullptr;

void replays_are_as_calls(const char* policy, int32_t rope = TANDEM_ROPE_CALLER) {
  constexpr int64_t kPrompt = 700;
  const HybridCache of_calls(engine, kLayers, kPrompt, 3, {4, rope}), of_replays(engine, kLayers, kPrompt, 3, {4, rope});
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = policy;
  options.window_tokens = 200;
  options.sink_tokens = 4;
  options.halo_tokens = 1;
  HybridSession calls(of_calls, options), replays(of_replays, options);
  Call call(3);  // the same addresses for all steps, because a graph holds them
  int64_t selected = -1;
  int n_changes = 0;
  for (int step = 0; step < kSteps; ++step) {
    const Call fresh(3, 100 + 3 * static_cast<uint64_t>(step));
    std::vector<__nv_bfloat16> outputs[2];
    for (int i = 0; i < 2; ++i) {
      for (int t = 0; t < 4; ++t)
        must(cudaMemcpy(call.device[t], fresh.device[t], (t % 3 == 0 ? fresh.q : fresh.k).size() * 2,
                        cudaMemcpyDeviceToDevice));
      HybridSession& session = i == 0 ? calls : replays;
      session.step(call.device_view, i == 1);
      session.wait();
      outputs[i] = call.device_output();
    }
    if (std::memcmp(outputs[0].data(), outputs[1].data(), outputs[0].size() * 2) != 0)
      fail_msg("other bits in step %d", step);
    const tandem_session_stats stats = calls.stats();
    n_changes += stats.selected_keys != selected;
    selected = stats.selected_keys;
    assert_int_equal(replays.stats().selected_keys, selected);
  }
  assert_true(calls.stats().evicted_tokens > 3 * kLayers * 100);
  if (std::string(policy) == "hgca" && n_changes < 5) fail_msg("the selection changed %d times", n_changes);
}

void dense_replays(void**) { replays_are_as_calls("all"); }
void streaming_replays(void**) { replays_are_as_calls("streaming"); }
void selecting_replays(void**) { replays_are_as_calls("hgca"); }
void replays_that_rotate(void**) { replays_are_as_calls("hgca", TANDEM_ROPE_HALVES); }

}  // namespace

int main(int argc, char** argv) {
  engine = make_engine(argc > 1 ? argv[1] : TANDEM_MODULE, 4);
  const CMUnitTest tests[] = {cmocka_unit_test(dense_replays), cmocka_unit_test(streaming_replays),
                              cmocka_unit_test(selecting_replays), cmocka_unit_test(replays_that_rotate)};
  const int failed = cmocka_run_group_tests(tests, nullptr, nullptr);
  tandem_engine_release(engine);
  return failed;
}
