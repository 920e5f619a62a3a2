// SPDX-License-Identifier: MIT
// Memory that cannot be pinned, and a device that is lost for good: the host's data stays right, and the library says which
// way the data took.
#include <sys/resource.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "device/step_runner.h"

using namespace tandem_test;

namespace {

constexpr int64_t kOneEach[] = {1, 1};
constexpr int64_t kLayerTokenBytes = 2 * kKvHeads * kDim * 2;  // K and V as bf16

int64_t pinned_bytes(const Side& side) {
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, side.cache);
  return stats.pinned_bytes;
}

void change_route(Side* side, const char* route, double fraction = -1.0) {
  tandem_session_options options = Side::options_of("all");
  options.route = route;
  options.stream_fraction = fraction;
  change_session(side, options);
}

// ---- RLIMIT_MEMLOCK 0 --------------------------------------------------------------------------------------------------

// New rows go through the pinned slots to pageable pages.
void calls_are_staged_without_pinned_pages(void**) {
  controls.obey_memlock();
  const int64_t n_pinned = counts.n_pinned;
  for (const char* route : {"host", "auto", "stream", "host+stream"}) {
    Side side(true);
    const Side twin(false);
    change_route(&side, route, std::strcmp(route, "host+stream") == 0 ? 0.5 : -1.0);
    int64_t n_tokens = 0;
    for (const int64_t n : {int64_t{200}, int64_t{1}, int64_t{40}, int64_t{1}, int64_t{1}, int64_t{130}, int64_t{1}}) {
      attend_twins(side, twin, n, 3 * n + n_tokens);
      n_tokens += n;
      assert_int_equal(side.stats().staged_kv_bytes, n_tokens * kLayerTokenBytes);
    }
    assert_int_equal(pinned_bytes(side), 0);
    assert_int_equal(side.stats().n_stream_parts > 0, std::strstr(route, "stream") != nullptr);
    uint64_t got = 0, wanted = 0;
    OK(tandem_sequence_digest, &got, side.cache, side.sequence);
    OK(tandem_sequence_digest, &wanted, twin.cache, twin.sequence);
    assert_true(got == wanted);
  }
  assert_int_equal(counts.n_pinned, n_pinned);
}

// The same in planned steps, call by call and as replays of a graph. The size of the graph's slots does not change.
void steps_are_staged_without_pinned_pages_in(const char* policy, bool as_graph) {
  Runner runner(150, policy);
  HostTwin twin(150, policy);
  int64_t shared = 0;
  for (int64_t step = 0; step < 80; ++step) {  // tokens leave the window meanwhile
    runner.set_inputs(step);
    runner.begin(kOneEach);
    if (as_graph && runner.graph == nullptr) runner.capture(kOneEach);
    if (as_graph)
      assert_true(controls.launch(runner.graph, runner.stream));
    else
      runner.attend_layers(kOneEach);
    runner.end();
    assert_close(runner.outputs(), twin.run_step(step));
    assert_int_equal(runner.side.stats().staged_kv_bytes, (step + 1) * kTwo * kStepLayers * kLayerTokenBytes);
    if (step == 0) shared = controls.shared_bytes();
    assert_int_equal(controls.shared_bytes(), shared);
  }
  assert_true(runner.side.stats().evicted_tokens > 0 && runner.side.stats().n_host_parts > 0);
  assert_int_equal(pinned_bytes(runner.side), 0);
  for (int i = 0; i < 2; ++i) {
    uint64_t digest = 0;
    OK(tandem_sequence_digest, &digest, twin.side.cache, twin.ids[i]);
    assert_true(runner.digest(i) == digest);
  }
}

void steps_are_staged_without_pinned_pages(void**) {
  controls.obey_memlock();
  const int64_t n_pinned = counts.n_pinned;
  for (const char* policy : {"all", "hgca"})
    for (const bool as_graph : {false, true}) steps_are_staged_without_pinned_pages_in(policy, as_graph);
  assert_int_equal(counts.n_pinned, n_pinned);
}

// ---- a device that is lost ---------------------------------------------------------------------------------------------

// Compares all stored K and V of both sides.
void assert_same_rows(const Side& side, const int64_t* ids, const Side& twin, const int64_t* twin_ids) {
  for (int i = 0; i < 2; ++i)
    for (int32_t layer = 0; layer < kStepLayers; ++layer) {
      int64_t n = 0, twin_n = 0;
      OK(tandem_sequence_length, &n, side.cache, ids[i], layer);
      OK(tandem_sequence_length, &twin_n, twin.cache, twin_ids[i], layer);
      assert_int_equal(n, twin_n);
      Tensor k({n, kKvHeads, kDim}, 1), v({n, kKvHeads, kDim}, 2), twin_k({n, kKvHeads, kDim}, 3),
          twin_v({n, kKvHeads, kDim}, 4);
      OK(tandem_sequence_read, &k.view, &v.view, side.cache, ids[i], layer, 0);
      OK(tandem_sequence_read, &twin_k.view, &twin_v.view, twin.cache, twin_ids[i], layer, 0);
      assert_memory_equal(k.values.data(), twin_k.values.data(), k.values.size() * sizeof(float));
      assert_memory_equal(v.values.data(), twin_v.values.data(), v.values.size() * sizeof(float));
    }
}

void expect_lost(Runner* runner) {
  for (int i = 0; i < 2; ++i) {  // the device stays lost
    tandem_error* error = nullptr;
    assert_int_equal(tandem_step_begin(runner->side.session, runner->ids, kOneEach, 2, runner->stream, &error),
                     TANDEM_ERROR_DEVICE_LOST);
    assert_int_equal(tandem_error_underlying(error), stand_in::kLostUnderlying);
    tandem_error_release(error);
    const tandem_attend_args args = runner->args(0, kOneEach);
    assert_int_equal(tandem_attend(runner->side.session, &args, &error), TANDEM_ERROR_DEVICE_LOST);
    tandem_error_release(error);
  }
}

// Attends one token of each sequence in every layer, with host tensors, in a session of either side.
void attend_on_host(const Runner& runner, tandem_session* session, HostTwin* twin, int64_t step) {
  const std::vector<float> wanted = twin->run_step(step);
  std::vector<float> got;
  for (int32_t layer = 0; layer < kStepLayers; ++layer) {
    const Call call(kTwo, 1000 + 10 * step + layer);
    tandem_attend_args args = call.args(runner.side, layer);
    args.n_sequences = 2;
    args.sequences = runner.ids;
    args.q_lens = kOneEach;
    OK(tandem_attend, session, &args);
    got.insert(got.end(), call.o.values.begin(), call.o.values.end());
  }
  assert_close(got, wanted);
}

// Loses the device between steps, or `after_ns` into a step. Then a session without a device goes on with the same cache,
// and so does the session itself. A twin that never had a device gives the outputs.
void a_session_goes_on_without(const char* policy, bool is_between, int64_t after_ns) {
  Runner runner(150, policy);
  HostTwin twin(150, policy);
  for (int64_t step = 0; step < 20; ++step) {
    runner.set_inputs(step);
    runner.begin(kOneEach);
    runner.attend_layers(kOneEach);
    runner.end();
    assert_close(runner.outputs(), twin.run_step(step));
  }
  OK(tandem_engine_drain, runner.side.engine, -1);
  const int64_t before = 170;
  if (!is_between) {
    runner.set_inputs(20);
    controls.set_delay(300'000);
    runner.begin(kOneEach);
    runner.attend_layers(kOneEach);
    runner.end();
    std::this_thread::sleep_for(std::chrono::nanoseconds(after_ns));
  }
  controls.lose_device();
  if (is_between) expect_lost(&runner);
  for (int i = 0; i < 2; ++i) {  // either the whole step has arrived or nothing of it stays
    int64_t shortest = INT64_MAX, n = 0;
    runner.digest(i);  // notices the loss
    for (int32_t layer = 0; layer < kStepLayers; ++layer) {
      OK(tandem_sequence_length, &n, runner.side.cache, runner.ids[i], layer);
      shortest = std::min(shortest, n);
    }
    assert_true(shortest == before + 30 * i || shortest == before + 30 * i + 1);
    OK(tandem_sequence_truncate, runner.side.cache, runner.ids[i], before + 30 * i);
  }
  expect_lost(&runner);
  assert_same_rows(runner.side, runner.ids, twin.side, twin.ids);
  const bool is_exact = std::strcmp(policy, "all") == 0;  // MAW of the window's keys went with the device
  tandem_session* fresh = nullptr;
  const tandem_session_options options = Side::options_of("all");
  OK(tandem_session_create, &fresh, runner.side.cache, &options);
  for (int64_t step = 21; is_exact && step < 30; ++step)
    attend_on_host(runner, step % 2 == 0 ? fresh : runner.side.session, &twin, step);
  if (is_exact) assert_same_rows(runner.side, runner.ids, twin.side, twin.ids);
  tandem_session_release(fresh);
  controls.reset();
}

void a_session_goes_on_without_a_device(void**) {
  for (const char* policy : {"all", "hgca"}) {
    a_session_goes_on_without(policy, true, 0);
    for (const int64_t after_ns : {0, 1'000'000, 3'000'000, 6'000'000}) a_session_goes_on_without(policy, false, after_ns);
  }
}

}  // namespace

int main() {
  const rlimit none = {0, 0};
  if (setrlimit(RLIMIT_MEMLOCK, &none) != 0) return 1;
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(calls_are_staged_without_pinned_pages, forget),
      cmocka_unit_test_teardown(steps_are_staged_without_pinned_pages, forget),
      cmocka_unit_test_teardown(a_session_goes_on_without_a_device, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
