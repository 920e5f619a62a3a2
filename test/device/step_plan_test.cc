// SPDX-License-Identifier: MIT
// Equal layers of a planned step are planned once. Any difference of a layer must be noticed: outputs and stored rows are
// those of a session without a device.
#include "device/step_runner.h"

using namespace tandem_test;

namespace {

constexpr int64_t kOneEach[] = {1, 1};

// The runner's two sequences, and two of a session on the host that get the same calls.
struct Twins {
  Runner planned;
  HostTwin twin;
  int64_t n_steps = 0;

  explicit Twins(int64_t prompt) : planned(prompt), twin(prompt, "all") {}

  // Makes the same calls on the host. Returns the outputs of each layer.
  std::vector<std::vector<float>> attend_on_host(const int64_t* q_lens) {
    std::vector<std::vector<float>> outputs;
    for (int32_t l = 0; l < kStepLayers; ++l) {
      Call call(kTwo, 1000 + 10 * n_steps + l);
      tandem_attend_args args = call.args(twin.side, l);
      args.n_sequences = 2;
      args.sequences = twin.ids;
      args.q_lens = q_lens;
      OK(tandem_attend, twin.side.session, &args);
      outputs.push_back(call.output());
    }
    return outputs;
  }
  void step(const int64_t* q_lens = kOneEach) {
    planned.set_inputs(n_steps);
    planned.begin(q_lens);
    planned.attend_layers(q_lens);
    planned.end();
    compare(attend_on_host(q_lens));
    ++n_steps;
  }
  void compare(const std::vector<std::vector<float>>& wanted) {
    planned.outputs();  // waits for the step
    for (size_t l = 0; l < wanted.size(); ++l) assert_close(planned.calls[l]->output(), wanted[l]);
  }
  void steps(int n) {
    while (n-- > 0) step();
  }
  // The host appends tokens of one layer of the first sequence. They are in the store and in no window.
  void append_on_host(int32_t layer, int64_t n) {
    const Tensor k({n, kKvHeads, kDim}, 300 + layer), v({n, kKvHeads, kDim}, 400 + layer);
    OK(tandem_sequence_append, planned.side.cache, planned.ids[0], layer, &k.view, &v.view, nullptr);
    OK(tandem_sequence_append, twin.side.cache, twin.ids[0], layer, &k.view, &v.view, nullptr);
  }
  // A call on device tensors appends the same tokens, so the layer's window gets them.
  void attend_on_device(int32_t layer, int64_t n) {
    Call call(n, 500 + layer), on_host(n, 500 + layer);
    call.to_device();
    attend(planned.side, call, layer, planned.stream);
    attend(twin.side, on_host, layer);
    planned.outputs();  // waits for the call
    assert_close(call.output(), on_host.output());
  }
  void compare_rows() {
    for (int i = 0; i < 2; ++i) {
      uint64_t digest = 0;
      OK(tandem_sequence_digest, &digest, twin.side.cache, twin.ids[i]);
      assert_true(planned.digest(i) == digest);
    }
  }
};

// Compares the counts of both sessions.
void compare_sums(const Twins& twins) {
  const tandem_session_stats got = twins.planned.side.stats(), wanted = twins.twin.side.stats();
  assert_int_equal(got.n_query_tokens, wanted.n_query_tokens);
  assert_int_equal(got.evicted_tokens, wanted.evicted_tokens);
  assert_int_equal(got.dense_kv_bytes, wanted.dense_kv_bytes);
  assert_int_equal(got.resident_kv_bytes_read, wanted.resident_kv_bytes_read);
  assert_int_equal(got.host_kv_bytes_read, wanted.host_kv_bytes_read);
}

// One layer, any of them, has tokens in its store alone. The other layers have them in their windows, too.
void a_window_that_lacks_rows_is_filled(void**) {
  for (int32_t odd = 0; odd < kStepLayers; ++odd) {
    Twins twins(20);
    twins.steps(3);
    for (int32_t l = 0; l < kStepLayers; ++l) l == odd ? twins.append_on_host(l, 7) : twins.attend_on_device(l, 7);
    twins.steps(3);
    twins.compare_rows();
    compare_sums(twins);
  }
}

// The windows of some layers begin elsewhere, because these layers were longer before.
void windows_that_begin_elsewhere_are_seen(void**) {
  for (int32_t odd = 0; odd < kStepLayers; ++odd) {
    Twins twins(20);
    twins.steps(3);
    for (int32_t l = 0; l < kStepLayers; ++l) twins.attend_on_device(l, l == odd ? 90 : 48);
    for (const auto& [cache, id] :
         {std::pair(twins.planned.side.cache, twins.planned.ids[0]), {twins.twin.side.cache, twins.twin.ids[0]}})
      OK(tandem_sequence_truncate, cache, id, 70);  // this window begins with token 6, those of the other layers with 0
    twins.steps(30);
    twins.compare_rows();
    compare_sums(twins);
  }
}

// The sequences were truncated, forked, or got other tokens since the step before.
void changed_sequences_are_seen(void**) {
  Twins twins(20);
  constexpr int64_t kTwoAndNone[] = {2, 0}, kNoneAndTwo[] = {0, 2};
  twins.steps(3);
  twins.step(kTwoAndNone);
  twins.step(kNoneAndTwo);
  const auto both = [&](auto change) {
    change(twins.planned.side.cache, twins.planned.ids);
    change(twins.twin.side.cache, twins.twin.ids);
  };
  both([](tandem_cache* cache, int64_t* ids) { OK(tandem_sequence_truncate, cache, ids[0], 11); });
  twins.steps(3);
  both([](tandem_cache* cache, int64_t* ids) { OK(tandem_sequence_fork, &ids[1], cache, ids[0]); });
  twins.steps(3);
  both([](tandem_cache* cache, int64_t* ids) { OK(tandem_sequence_remove, cache, ids[0], 3, 4, 0); });
  twins.steps(3);
  both([](tandem_cache*, int64_t* ids) { std::swap(ids[0], ids[1]); });
  twins.steps(150);  // needs a new page of the window and has keys outside it
  twins.compare_rows();
  compare_sums(twins);
}

// Layers of two policies.
void other_policies_are_planned_apart(void**) {
  for (const int32_t odd : {0, 1}) {
    const char* policies[] = {"all", "all", "all"};
    policies[odd] = "streaming";
    Twins twins(20);
    for (Side* side : {&twins.planned.side, &twins.twin.side}) {
      tandem_session_options options = Side::options_of("all");
      options.sink_tokens = 4;
      options.layer_policies = policies;
      options.n_layer_policies = kStepLayers;
      change_session(side, options);
    }
    twins.steps(100);
    twins.compare_rows();
  }
}

// More steps in flight than a session has room for. The data that their tasks share lives until the last of them ends. All
// steps have the same inputs.
void steps_in_flight_keep_their_calls(void**) {
  constexpr int kMany = 60;
  constexpr int64_t kTwoAndNone[] = {2, 0};
  const auto q_lens = [&](int i) { return i % 3 == 2 ? kTwoAndNone : kOneEach; };
  Twins twins(10);
  twins.steps(2);
  twins.planned.set_inputs(twins.n_steps);
  controls.set_delay(200'000);
  for (int i = 0; i < kMany; ++i) {
    twins.planned.begin(q_lens(i));
    twins.planned.attend_layers(q_lens(i));
    twins.planned.end();
  }
  controls.set_delay(0);
  std::vector<std::vector<float>> wanted;
  for (int i = 0; i < kMany; ++i) wanted = twins.attend_on_host(q_lens(i));
  twins.compare(wanted);
  twins.compare_rows();
}

// After a step is rolled back, layers have what they had before.
void a_step_taken_back_leaves_no_trace(void**) {
  Twins twins(20);
  twins.steps(3);
  for (const int32_t n_done : {0, 1, 2}) {
    twins.planned.set_inputs(900);
    twins.planned.begin(kOneEach);
    twins.planned.attend_layers(kOneEach, n_done);
    twins.planned.end();
    twins.compare_rows();
    tandem_error* error = nullptr;
    assert_int_equal(
        tandem_step_begin(twins.planned.side.session, twins.planned.ids, kOneEach, 2, twins.planned.stream, &error),
        TANDEM_ERROR_INVALID_STATE);
    tandem_error_release(error);
    twins.steps(3);
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(a_window_that_lacks_rows_is_filled, forget),
      cmocka_unit_test_teardown(windows_that_begin_elsewhere_are_seen, forget),
      cmocka_unit_test_teardown(changed_sequences_are_seen, forget),
      cmocka_unit_test_teardown(other_policies_are_planned_apart, forget),
      cmocka_unit_test_teardown(steps_in_flight_keep_their_calls, forget),
      cmocka_unit_test_teardown(a_step_taken_back_leaves_no_trace, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
