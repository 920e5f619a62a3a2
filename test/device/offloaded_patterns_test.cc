// SPDX-License-Identifier: MIT
// Policy "patterns" on device tensors with windows that have only the newest tokens. Appends bring the keys of their layer
// to the device. In decode calls the CPU attends the keys outside the window. Outputs, keys and counts are those on host
// tensors.
#include "device/pattern_twins.h"

using namespace tandem_test;

namespace {

const std::vector<std::vector<tandem_head_pattern>> kAllHeads = {some_heads(), without_sinks(), {kFull, kFull, kFull, kFull},
                                                                 alike(),      choosing(),      more_choosing()};

// A window of 12 tokens ends within a unit of 8, and at first within the sinks.
void calls_answer_as_on_the_host(void**) {
  for (const auto& heads : kAllHeads)
    for (const int64_t window_tokens : {0, 12, 64, 300}) {
      Patterned patterned(kQHeads, heads);
      patterned.options.window_tokens = window_tokens;
      expect_same_calls(patterned);
    }
}

void long_appends_answer_as_on_the_host(void**) {
  for (const auto& heads : {some_heads(), alike(), choosing()}) {
    Patterned patterned(kQHeads, heads);
    patterned.options.window_tokens = 500;
    expect_same_long_appends(patterned);
  }
}

void batches_answer_as_on_the_host(void**) {
  for (const auto& heads : {some_heads(), choosing(), more_choosing()})
    for (const auto* calls : {&kBothKinds, &kAnyOrder}) {
      Patterned patterned(kQHeads, heads);
      patterned.options.window_tokens = 64;
      attend_batches(patterned, *calls);
    }
}

// In a partial append a single query belongs to a prompt too, whichever sequence is longer.
void partial_batches_answer_as_on_the_host(void**) {
  for (const auto& heads : {some_heads(), choosing()})
    for (const auto& calls :
         {std::vector<std::vector<int64_t>>{{200, 900}, {5, 1}}, {{900, 200}, {5, 1}}, {{40, 900}, {5, 1}}}) {
      Patterned patterned(kQHeads, heads);
      patterned.options.window_tokens = 64;
      attend_batches(patterned, calls, TANDEM_ATTEND_PARTIAL);
    }
}

// Some rows in the pages of the window belong to heads that did not attend them. A truncation brings these rows back into
// the window.
void truncations_look_back_over_the_window(void**) {
  for (const auto& heads : {some_heads(), without_sinks()})
    for (const int64_t n_kept : {290, 277, 262}) {
      Patterned patterned(kQHeads, heads);
      patterned.options.window_tokens = 64;
      Twins twins(patterned);
      twins.attend(300);
      for (int i = 0; i < 8; ++i) twins.attend(1);
      twins.attend(10);
      for (Side* each : {&twins.side, &twins.twin}) OK(tandem_sequence_truncate, each->cache, each->sequence, n_kept);
      for (const int64_t n : {1, 1, 40, 1}) twins.attend(n);
    }
}

// Layers of different types take turns with the buffers.
void layers_answer_as_on_the_host(void**) {
  constexpr int32_t kManyLayers = 3;
  Patterned patterned(int64_t{kManyLayers} * kQHeads, choosing());
  patterned.options.window_tokens = 100;
  const int32_t types[kManyLayers] = {TANDEM_F32, TANDEM_Q8_0, TANDEM_BF16};
  tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  cache.layer_k_types = cache.layer_v_types = types;
  Side side(true), twin(false);
  for (Side* each : {&side, &twin}) make_anew(each, TANDEM_LAYER_OPTIONS_INIT, kManyLayers, cache, patterned.options);
  int64_t seed = 1;
  for (const int64_t n : {300, 40, 1, 150, 2})
    for (int32_t l = 0; l < kManyLayers; ++l, ++seed) {
      Call on_device(n, seed), on_host(n, seed);
      on_device.to_device();
      const tandem_attend_args args = on_device.args(side, l), host_args = on_host.args(twin, l);
      OK(tandem_attend, side.session, &args);
      OK(tandem_attend, twin.session, &host_args);
      assert_close_to(on_device.output(), on_host.output(),
                      "layer " + std::to_string(l) + ", " + std::to_string(n) + " tokens");
    }
}

// The host appends tokens in between, so windows lack them.
void rows_from_elsewhere_are_attended(void**) {
  Patterned patterned(kQHeads, choosing());
  patterned.options.window_tokens = 200;
  Twins twins(patterned);
  twins.attend(400);
  for (Side* each : {&twins.side, &twins.twin}) {
    const Call more(170, 77);
    const tandem_attend_args args = more.args(*each);
    OK(tandem_attend, each->session, &args);
  }
  for (const int64_t n : {150, 1, 3}) twins.attend(n);
}

void planned_steps_answer_as_on_the_host(void**) {
  for (const auto& heads : kAllHeads)
    for (const int64_t window_tokens : {12, 64}) {
      Patterned patterned(int64_t{kStepLayers} * kQHeads, heads);
      patterned.options.window_tokens = window_tokens;
      expect_same_steps(patterned);
    }
}

// For heads with sinks and a window, the tokens between these stay on the host. One of the two KV heads attends all keys.
void only_named_keys_are_brought(void**) {
  constexpr int64_t kBefore = 2000, kRow = 2 * kDim * 2;  // K and V of a KV head
  const auto brought_by = [](const std::vector<tandem_head_pattern>& heads) {
    Patterned patterned(kQHeads, heads);
    patterned.options.window_tokens = 64;
    Twins twins(patterned);
    for (int64_t n = 0; n < kBefore; n += 500) twins.attend(500);
    const int64_t before = twins.side.stats().filled_kv_bytes;
    twins.attend(100);
    return twins.side.stats().filled_kv_bytes - before;
  };
  const int64_t all = brought_by({kFull, kFull, kFull, kFull});
  assert_in_range(all, 2 * (kBefore - 64 - 128) * kRow, 2 * kBefore * kRow);  // the window has the other keys
  assert_in_range(brought_by({a_shape(20, 200), kFull, a_shape(20, 200), a_shape(9, 150)}), all / 2,
                  all / 2 + (24 + 200) * kRow);
  assert_in_range(brought_by({a_shape(20, 200), a_shape(0, 20), a_shape(20, 200), a_shape(9, 150)}), 1,
                  2 * (24 + 200) * kRow);
}

// Failures in the first chunk and in the second one.
void failures_take_all_back(void**) {
  using enum stand_in::Call;
  Patterned choosing_heads(kQHeads, choosing()), in_chunks(kQHeads, some_heads());
  choosing_heads.options.window_tokens = in_chunks.options.window_tokens = 64;
  in_chunks.options.append_tokens = TANDEM_PATTERN_BLOCK;
  for (const stand_in::Call failing : {kIndexPatterns, kListPatterns, kCopyStrided, kAppend, kWaitEvent, kRecordEvent})
    expect_taken_back(choosing_heads, failing, 1);
  for (const stand_in::Call failing : {kAppend, kAttend, kCopyStrided, kWaitEvent, kRecordEvent})
    for (const int64_t nth : {1, 2}) expect_taken_back(in_chunks, failing, nth);
}

// The sequence may be dropped while its keys are in flight.
void a_sequence_may_go_at_once(void**) {
  Patterned patterned(kQHeads, choosing());
  patterned.options.window_tokens = 64;
  Twins twins(patterned);
  twins.attend(700);
  Call call(140, 7);
  call.to_device();
  const tandem_attend_args args = call.args(twins.side);
  OK(tandem_attend, twins.side.session, &args);
  OK(tandem_sequence_drop, twins.side.cache, twins.side.sequence);
  int64_t n = -1;
  assert_int_equal(tandem_sequence_length(&n, twins.side.cache, twins.side.sequence, 0, nullptr), TANDEM_ERROR_NOT_FOUND);
}

void assert_refuses(const Side& side, const tandem_attend_args& args) {
  const int64_t before = side.length();
  tandem_error* error = nullptr;
  const int32_t status = tandem_attend(side.session, &args, &error);
  assert_refused(status, error, TANDEM_ERROR_CAPACITY, "window_tokens", "policy \"patterns\"");
  assert_int_equal(side.length(), before);
}

// Refusals: windows have rotated keys and the store does not; queries of tokens already in the cache bring no keys.
void what_is_refused(void**) {
  Patterned patterned(kQHeads, choosing());
  patterned.options.window_tokens = 64;
  Side rotated(true, "all", 0, 1, kWindow, TANDEM_ROPE_HALVES), side(true);
  Call call(100, 1);
  call.to_device();
  change_session(&rotated, patterned.options);
  assert_refuses(rotated, call.args(rotated));
  change_session(&side, patterned.options);
  tandem_attend_args args = call.args(side);
  OK(tandem_attend, side.session, &args);
  args.k = args.v = nullptr;
  assert_refuses(side, args);
}

void plans_what_is_held(void**) {
  for (const auto& heads : {some_heads(), choosing()}) {
    Patterned patterned(kQHeads, heads);
    patterned.options.window_tokens = 300;
    patterned.options.append_tokens = 1000;
    assert_true(expect_planned(patterned, {1000, 1000, 1000, 1}).device_stream_bytes > 0);
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(calls_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(long_appends_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(batches_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(partial_batches_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(truncations_look_back_over_the_window, forget),
      cmocka_unit_test_teardown(layers_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(rows_from_elsewhere_are_attended, forget),
      cmocka_unit_test_teardown(planned_steps_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(only_named_keys_are_brought, forget),
      cmocka_unit_test_teardown(failures_take_all_back, forget),
      cmocka_unit_test_teardown(a_sequence_may_go_at_once, forget),
      cmocka_unit_test_teardown(what_is_refused, forget),
      cmocka_unit_test_teardown(plans_what_is_held, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
