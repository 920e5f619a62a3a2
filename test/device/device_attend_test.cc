// SPDX-License-Identifier: MIT
// Calls of the C ABI on device tensors, on the stand-in: what they refuse, which memory they take and when, and what is left
// when the device fails. device_stream_test checks numbers in all circumstances. Here a twin without a device gives the
// expected numbers.
#include <atomic>
#include <thread>

#include "device/device_side.h"
#include "device/gate.h"

using namespace tandem_test;

namespace {

void assert_refused(const Side& side, const tandem_attend_args& args, int32_t status, const char* field, const char* text) {
  tandem_error* error = nullptr;
  const int32_t got = tandem_attend(side.session, &args, &error);
  tandem_test::assert_refused(got, error, status, field, text);
}

// ---- tests -------------------------------------------------------------------------------------------------------------

void refuses_what_tickets_cannot_name(void**) {
  constexpr int32_t kMostLayers = 2048, kLast = kMostLayers - 1;
  const Side side(true, "all", 0, kMostLayers);
  Call call(1, 1);
  call.to_device();
  attend(side, call, kLast);
  attend(side, call, kLast);
  OK(tandem_engine_drain, side.engine, -1);
  assert_int_equal(side.length(kLast), 2);
}

void refuses(void**) {
  const Side side(true), without(false);
  Call call(2, 1);
  call.to_device();
  const tandem_attend_args good = call.args(side);
  assert_refused(without, call.args(without), TANDEM_ERROR_UNSUPPORTED, "q.device_type", "the engine has no device");
  for (const char* name : {"q", "k", "v", "o"}) {
    tandem_attend_args args = good;
    tandem_tensor moved = *(*name == 'q' ? good.q : *name == 'k' ? good.k : *name == 'v' ? good.v : good.o);
    (*name == 'q' ? args.q : *name == 'k' ? args.k : *name == 'v' ? args.v : args.o) = &moved;
    moved.device_index = 1;
    assert_refused(side, args, TANDEM_ERROR_INVALID_ARGUMENT, (std::string(name) + ".device_index").c_str(),
                   "the engine's device is 0");
    moved.device_index = 0;
    moved.device_type = TANDEM_DEVICE_HOST;
    const bool is_q = *name == 'q';  // if q is moved, k is the first tensor on the other device
    assert_refused(side, args, TANDEM_ERROR_INVALID_ARGUMENT,
                   is_q ? "k.device_type" : (std::string(name) + ".device_type").c_str(),
                   is_q ? "q is in host memory" : "q is in device memory");
  }
  Call large(513, 1);
  large.to_device();
  tandem_attend_args args = large.args(side);
  args.flags = TANDEM_ATTEND_SPECULATIVE;
  assert_refused(side, args, TANDEM_ERROR_UNSUPPORTED, "q_lens", "513 speculative tokens");
  args = good;
  const int32_t cancel = 0;
  args.cancel = &cancel;
  assert_refused(side, args, TANDEM_ERROR_UNSUPPORTED, "cancel", "q is in device memory");
  args.cancel = nullptr;
  args.progress = [](int64_t, int64_t, void*) { return 0; };
  assert_refused(side, args, TANDEM_ERROR_UNSUPPORTED, "progress", "q is in device memory");
  args = good;
  std::vector<unsigned char> blocks(2 * kKvHeads * kDim / 32 * 34);
  tandem_tensor coded = *good.k;
  coded.dtype = TANDEM_Q8_0;
  coded.data = blocks.data();
  args.k = &coded;
  assert_refused(side, args, TANDEM_ERROR_UNSUPPORTED, "k.dtype", "f32, f16 and bf16");
  args = good;
  args.stream = controls.create_stream();
  assert_true(controls.begin_capture(args.stream));
  assert_refused(side, args, TANDEM_ERROR_INVALID_STATE, "stream", "is being captured");
  controls.free_graph(controls.end_capture(args.stream));
  assert_true(controls.destroy_stream(args.stream));
  Call on_host(2, 1);
  args = on_host.args(side);
  args.stream = &args;
  assert_refused(side, args, TANDEM_ERROR_INVALID_ARGUMENT, "stream", "must be NULL");
  assert_int_equal(side.length(), 0);
}

void compare_with_plan(const char* policy) {
  const Side side(true, policy), twin(false, policy);
  attend_twins(side, twin, 1, 1);
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const tandem_session_options options = Side::options_of(policy);
  const int64_t kv_len = 1;
  OK(tandem_plan_memory, &plan, side.engine, side.model, nullptr, &options, &kv_len, 1);
  assert_true(plan.device_window_bytes > 0);
  assert_never_more(side, plan);
}

void takes_what_is_planned(void**) {
  for (const char* policy : {"all", "streaming", "hgca"}) compare_with_plan(policy);
}

constexpr int64_t kWindowPage = 128;  // tokens

tandem_memory_plan plan_of(const Side& side, const tandem_session_options& options, int64_t kv_len) {
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  OK(tandem_plan_memory, &plan, side.engine, side.model, nullptr, &options, &kv_len, 1);
  return plan;
}

int64_t held_window(const Side& side) {
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, side.cache);
  return stats.device_window_bytes;
}

// A window has one page for each 128 tokens, up to its length, as the plan says. Outputs do not change when it grows.
void windows_grow_with_their_sequences(void**) {
  for (const char* policy : {"all", "hgca"}) {
    const Side side(true, policy, 0, 1, 500), twin(false, policy, 0, 1, 500);
    tandem_session_options options = Side::options_of(policy);
    options.window_tokens = 500;
    const int64_t page = plan_of(side, options, 1).device_window_bytes;
    int64_t seed = 1, length = 0, filled = 0;
    for (const int64_t n : {1, 63, 63, 1, 1, 1, 60, 1, 70, 1, 60, 60, 60, 60, 60, 60, 60, 1, 1, 60, 60, 60, 60, 1}) {
      attend_twins(side, twin, n, seed += 10);
      length += n;
      const tandem_memory_plan plan = plan_of(side, options, length);
      filled = std::max(filled, plan.device_window_bytes);
      if (n == 1) assert_int_equal(held_window(side), filled);
      const int64_t n_pages = (length + kWindowPage - 1) / kWindowPage;
      assert_int_equal(plan.device_window_bytes, std::min(n_pages * page, plan.device_window_max_bytes));
    }
    assert_int_equal(filled, plan_of(side, options, 1).device_window_max_bytes);
  }
}

// A page beyond the cap is refused, and nothing has changed.
void windows_grow_up_to_the_cap(void**) {
  const Side planner(true);
  tandem_session_options options = Side::options_of("all");
  options.window_tokens = 500;
  const tandem_memory_plan plan = plan_of(planner, options, 1);
  const Side side(true, "all", plan.device_window_bytes + plan.device_work_bytes, 1, 500);
  const Side twin(false, "all", 0, 1, 500);
  for (int64_t i = 0; i < kWindowPage; ++i) attend_twins(side, twin, 1, i);
  Call call(1, 500), on_host(1, 500), on_twin(1, 500);
  call.to_device();
  assert_refused(side, call.args(side), TANDEM_ERROR_CAPACITY, "device_cap_bytes", "device_cap_bytes");
  assert_int_equal(side.length(), kWindowPage);
  attend(side, on_host);
  attend(twin, on_twin);
  assert_close(on_host.output(), on_twin.output());
  OK(tandem_sequence_truncate, side.cache, side.sequence, 100);
  OK(tandem_sequence_truncate, twin.cache, twin.sequence, 100);
  attend_twins(side, twin, 1, 600);
}

// A session that finds a long sequence takes all pages of its window, wherever the tokens lie in the ring.
void windows_of_long_sequences_are_full(void**) {
  const Side side(true, "all", 0, 1, 300), twin(false, "all", 0, 1, 300);
  Call there(900, 1), here(900, 1);
  attend(side, there);
  attend(twin, here);
  for (int64_t i = 0; i < 300; ++i) attend_twins(side, twin, 1, 10 + i);
  tandem_session_options options = Side::options_of("all");
  options.window_tokens = 300;
  assert_int_equal(held_window(side), plan_of(side, options, 1200).device_window_max_bytes);
}

// A step in the steady state waits for nothing and allocates nothing, although the device has not begun.
void takes_nothing_later(void**) {
  const Side side(true), twin(false);
  attend_twins(side, twin, kPrompt, 1);
  attend_twins(side, twin, 1, 2);
  const int64_t n_waits = counts.n_waits, n_allocated = counts.n_allocated, n_shared = counts.n_shared;
  constexpr int kSteps = 12;
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < kSteps; ++i) {
    calls.push_back(std::make_unique<Call>(1, 10 + i));
    calls.back()->to_device();
  }
  const int64_t n_waits_of_uploads = counts.n_waits - n_waits;
  const int64_t n_allocated_by_calls = counts.n_allocated - n_allocated;
  stand_in::Gate gate(controls);
  for (const auto& call : calls) attend(side, *call);
  assert_false(gate.is_open());
  gate.open();
  assert_int_equal(counts.n_waits - n_waits, n_waits_of_uploads);
  assert_int_equal(counts.n_allocated - n_allocated, n_allocated_by_calls);
  assert_int_equal(counts.n_shared, n_shared);
  for (int i = 0; i < kSteps; ++i) {
    Call on_host(1, 10 + i);
    attend(twin, on_host);
    assert_close(calls[static_cast<size_t>(i)]->output(), on_host.output());
  }
  const tandem_session_stats stats = side.stats();
  assert_int_equal(stats.n_device_attends, kSteps + 2);
  assert_true(stats.n_host_parts >= kSteps && stats.host_part_ns > 0);
  assert_int_equal(stats.staged_kv_bytes, (kPrompt + 1 + kSteps) * kKvHeads * kDim * 2 * 2);
  assert_int_equal(stats.filled_kv_bytes, 0);
}

// Every call of the device fails in turn while a call starts. The call reports the failure, no sequence grows, and the next
// try succeeds.
void fail_calls(const char* policy) {
  const stand_in::Call kCalls[] = {stand_in::kAllocate, stand_in::kAllocateShared, stand_in::kCopy,   stand_in::kFill,
                                   stand_in::kWait,     stand_in::kSupports,       stand_in::kAppend, stand_in::kAttend,
                                   stand_in::kMerge,    stand_in::kObserve};
  for (const stand_in::Call failing : kCalls) {
    const bool selects = std::strcmp(policy, "hgca") == 0;
    if (failing == stand_in::kObserve && !selects) continue;
    int n_failed = 0;
    for (int64_t nth = 1;; ++nth) {
      const Side side(true, policy), twin(false, policy);
      Call first(kPrompt, 1), first_host(kPrompt, 1);
      attend(side, first);
      attend(twin, first_host);
      Call call(1, 2), call_host(1, 2);
      call.to_device();
      const int32_t status = attend_failing(side, call.args(side), failing, nth);
      if (status == TANDEM_OK && nth > 1) break;
      if (status != TANDEM_OK) {
        ++n_failed;
        assert_int_equal(status, TANDEM_ERROR_BACKEND);
        assert_int_equal(side.length(), kPrompt);
        attend(side, call);
      }
      attend(twin, call_host);
      assert_close(call.output(), call_host.output());
      attend_twins(side, twin, 3, 7);
      if (status == TANDEM_OK) break;
    }
    if (n_failed == 0 && failing != stand_in::kSupports) fail_msg("call %d was never made to fail", failing);
  }
}

void survives_failing_calls(void**) { fail_calls("all"); }
void survives_failing_calls_that_select(void**) { fail_calls("hgca"); }

void fails(const Side& side, const Call& call) {
  const tandem_attend_args args = call.args(side);
  tandem_error* error = nullptr;
  assert_int_equal(tandem_attend(side.session, &args, &error), TANDEM_ERROR_BACKEND);
  tandem_error_release(error);
}

// If a later chunk of an append fails, the whole append is rolled back.
void take_back(const char* policy) {
  constexpr int64_t kLong = 1200;
  for (const stand_in::Call failing : {stand_in::kAppend, stand_in::kAttend, stand_in::kMerge}) {
    const Side side(true, policy), twin(false, policy);
    // more tokens than the window has; the CPU attends the older ones, with a ticket of queries at a time
    attend_twins(side, twin, kPrompt, 1);
    Call call(kLong, 2), call_host(kLong, 2);
    call.to_device();
    controls.fail_call(failing, 2, TANDEM_ERROR_BACKEND);
    fails(side, call);
    assert_int_equal(side.length(), kPrompt);
    attend(side, call);
    attend(twin, call_host);
    assert_close(call.output(), call_host.output());
    assert_int_equal(side.length(), kPrompt + kLong);
  }
}

void takes_long_appends_back(void**) { take_back("all"); }
void takes_back_what_selects(void**) { take_back("hgca"); }

// A session that finds a long sequence has its old keys judged by the first call that succeeds.
void finds_a_sequence_again(void**) {
  for (const stand_in::Call failing : {stand_in::kCopy, stand_in::kAppend, stand_in::kAttend, stand_in::kObserve}) {
    const Side side(true, "hgca"), twin(false, "hgca");
    for (const Side* one : {&side, &twin}) {
      const Tensor k({kPrompt, kKvHeads, kDim}, 1), v({kPrompt, kKvHeads, kDim}, 2);
      OK(tandem_sequence_append, one->cache, one->sequence, kLayer, &k.view, &v.view, nullptr);
    }
    Call call(1, 3), call_host(1, 3);
    call.to_device();
    controls.fail_call(failing, 1, TANDEM_ERROR_BACKEND);
    fails(side, call);
    attend(side, call);
    attend(twin, call_host);
    assert_close(call.output(), call_host.output());
    attend_twins(side, twin, 1, 7);
    assert_int_equal(side.stats().selected_keys, twin.stats().selected_keys);
    assert_int_equal(side.stats().evicted_tokens, twin.stats().evicted_tokens);
  }
}

// Rows of a failed call have overwritten older rows, which a truncation brings back into the window.
void forgets_what_is_overwritten(void**) {
  for (const stand_in::Call failing : {stand_in::kAttend, stand_in::kMerge}) {
    const Side side(true), twin(false);
    attend_twins(side, twin, 500, 1);
    Call call(400, 2);
    call.to_device();
    controls.fail_call(failing, 1, TANDEM_ERROR_BACKEND);
    fails(side, call);
    for (const int64_t length : {400, 300, 200, 120}) {
      OK(tandem_sequence_truncate, side.cache, side.sequence, length);
      OK(tandem_sequence_truncate, twin.cache, twin.sequence, length);
      attend_twins(side, twin, 1, length);
    }
  }
}

// The device is lost while another thread reads all the time. The rows that had arrived stay.
void loses_nothing_twice(void**) {
  for (int round = 0; round < 30; ++round) {
    Side side(true);
    Call first(20, 1);
    first.to_device();
    attend(side, first);
    std::vector<std::unique_ptr<Call>> calls;
    for (int i = 0; i < 8; ++i) {
      calls.push_back(std::make_unique<Call>(1, 10 + i));
      calls.back()->to_device();
    }
    controls.set_delay(200'000);
    std::atomic<bool> stops{false};
    std::thread reader([&] {
      while (!stops) {
        uint64_t digest = 0;
        OK(tandem_sequence_digest, &digest, side.cache, side.sequence);
      }
    });
    for (int i = 0; i < 8; ++i) {
      if (i == 4) controls.lose_device();
      const tandem_attend_args args = calls[static_cast<size_t>(i)]->args(side);
      tandem_error* error = nullptr;
      tandem_attend(side.session, &args, &error);
      tandem_error_release(error);
    }
    stops = true;
    reader.join();
    const int64_t n_arrived = side.stats().staged_kv_bytes / (kKvHeads * kDim * 2 * 2);
    assert_int_equal(side.length(), n_arrived);
    controls.reset();
  }
}

// Streaming with sinks alone: queries attend neither each other nor themselves.
void windows_may_be_empty(void**) {
  const Side side(true, "streaming", 0, 1, 0), twin(false, "streaming", 0, 1, 0);
  for (const int64_t n : {5, 10, 1, 7}) attend_twins(side, twin, n, n);
}

// Queries of tokens that are already in the cache, with some tokens between them removed: their positions have gaps.
void queries_may_be_apart(void**) {
  for (const int32_t rope : {TANDEM_ROPE_CALLER, TANDEM_ROPE_HALVES, TANDEM_ROPE_INTERLEAVED}) {
    const Side side(true, "all", 0, 1, kWindow, rope), twin(false, "all", 0, 1, kWindow, rope);
    attend_twins(side, twin, kPrompt, 1);
    for (const Side* one : {&side, &twin}) {
      OK(tandem_sequence_remove, one->cache, one->sequence, kPrompt - 9, 5, 0);
      OK(tandem_sequence_remove, one->cache, one->sequence, 20, 10, 0);
    }
    Call on_device(8, 2), on_host(8, 2);
    on_device.to_device();
    for (const auto& [one, call] : {std::pair{&side, &on_device}, std::pair{&twin, &on_host}}) {
      tandem_attend_args args = call->args(*one);
      args.k = args.v = nullptr;
      OK(tandem_attend, one->session, &args);
    }
    assert_close(on_device.output(), on_host.output());
    attend_twins(side, twin, 3, 3);
  }
}

void caps_hold(void**) {
  const Side side(true, "all", 10'000);
  Call call(1, 1);
  call.to_device();
  assert_refused(side, call.args(side), TANDEM_ERROR_CAPACITY, "device_cap_bytes", "device_cap_bytes = 10000");
  assert_int_equal(side.length(), 0);
  Call on_host(1, 1);
  attend(side, on_host);
  assert_int_equal(side.length(), 1);
}

// A call says that the device is lost, not that memory is short, even if it asks for memory first.
void a_lost_device_is_called_lost(void**) {
  for (const char* route : {"host", "auto"}) {
    Side side(true);
    tandem_session_options options = Side::options_of("all");
    options.route = route;
    change_session(&side, options);
    Call call(1, 1);
    call.to_device();
    controls.lose_device();
    assert_refused(side, call.args(side), TANDEM_ERROR_DEVICE_LOST, "", "the device is lost");
    assert_int_equal(side.length(), 0);
    controls.reset();
  }
}

// After a loss the rows that had arrived are there, the others are gone, and the host goes on.
void lose_the_device(const char* policy) {
  Side side(true, policy), twin(false, policy);
  attend_twins(side, twin, kPrompt, 1);
  Call late(1, 2);
  late.to_device();
  stand_in::Gate gate(controls);
  const tandem_attend_args args = late.args(side);
  OK(tandem_attend, side.session, &args);
  assert_int_equal(side.length(), kPrompt + 1);
  controls.lose_device();
  gate.open();
  uint64_t digest = 0, wanted = 0;
  OK(tandem_sequence_digest, &digest, side.cache, side.sequence);
  OK(tandem_sequence_digest, &wanted, twin.cache, twin.sequence);
  assert_true(digest == wanted);
  assert_int_equal(side.length(), kPrompt);
  assert_refused(side, args, TANDEM_ERROR_DEVICE_LOST, "session", "host tensors still work");
  // By the same session, and by another one on the same cache.
  Call again(1, 2), again_host(1, 2);
  attend(side, again);
  attend(twin, again_host);
  assert_close(again.output(), again_host.output());
  const tandem_session_options options = Side::options_of(policy);
  tandem_session *other = nullptr, *other_twin = nullptr;
  OK(tandem_session_create, &other, side.cache, &options);
  OK(tandem_session_create, &other_twin, twin.cache, &options);
  std::swap(side.session, other);
  std::swap(twin.session, other_twin);
  Call next(1, 3), next_host(1, 3);
  attend(side, next);
  attend(twin, next_host);
  assert_close(next.output(), next_host.output());
  tandem_session_release(other);
  tandem_session_release(other_twin);
}

// NaN reaches the rows that attend it, in the call and later, and no other row, as on the host.
void nan_goes_where_it_is_seen(void**) {
  for (const char* policy : {"all", "streaming", "hgca"})
    for (Tensor Call::*bad : {&Call::q, &Call::k, &Call::v}) {
      const Side side(true, policy), twin(false, policy);
      attend_twins(side, twin, kPrompt, 1);
      Call call(3, 5), call_host(3, 5), next(1, 6), next_host(1, 6);
      for (Call* one : {&call, &call_host}) {
        Tensor& tensor = one->*bad;
        tensor.values[tensor.values.size() / 2 + 3] = NAN;  // in the second token
      }
      call.to_device();
      next.to_device();
      attend(side, call);
      attend(twin, call_host);
      attend(side, next);
      attend(twin, next_host);
      for (const auto& [got, wanted] : {std::pair{call.output(), call_host.output()}, {next.output(), next_host.output()}})
        for (size_t i = 0; i < got.size(); ++i)
          if (std::isnan(wanted[i]) ? !std::isnan(got[i]) : !(std::fabs(got[i] - wanted[i]) <= 1e-5f))
            fail_msg("%s: element %zu is %g, not %g", policy, i, got[i], wanted[i]);
      const std::vector<float> output = call_host.output();
      assert_true(std::any_of(output.begin(), output.end(), [](float x) { return std::isnan(x); }));
    }
}

void loses_the_device(void**) { lose_the_device("all"); }
void loses_the_device_that_has_maw(void**) { lose_the_device("hgca"); }

// The window grows for one layer that has since gone round in its ring, while another layer is behind. The averages of the
// keys that the other layer still has there are kept.
void windows_grow_for_a_layer_that_is_ahead(void**) {
  const Side side(true, "hgca", 0, 2), twin(false, "hgca", 0, 2);
  const auto both = [&](int64_t n, int64_t seed, int32_t layer, bool on_device) {
    Call call(n, seed), on_host(n, seed);
    if (on_device) call.to_device();
    attend(side, call, layer);
    attend(twin, on_host, layer);
    assert_close(call.output(), on_host.output());
  };
  for (int32_t layer = 0; layer < 2; ++layer) both(kPrompt, 10 * layer, layer, false);
  for (int64_t i = 0; i < 20; ++i)
    for (int32_t layer = 0; layer < 2; ++layer) both(1, 100 + 10 * i + 5 * layer, layer, true);
  for (int64_t i = 0; i < 250; ++i) both(1, 1000 + 5 * i, 0, true);
  both(300, 5000, 0, true);
  for (int64_t i = 0; i < 100; ++i) both(1, 6000 + 5 * i, 1, true);
  for (int32_t q_head = 0; q_head < kQHeads; ++q_head) {
    int64_t n = 0, n_twin = 0;
    std::vector<int64_t> idx(500), idx_twin(500);
    std::vector<float> maw(500), maw_twin(500);
    OK(tandem_session_selection, idx.data(), maw.data(), 500, &n, side.session, side.sequence, 1, q_head / 2, q_head % 2);
    OK(tandem_session_selection, idx_twin.data(), maw_twin.data(), 500, &n_twin, twin.session, twin.sequence, 1, q_head / 2,
       q_head % 2);
    assert_int_equal(n, n_twin);
    assert_memory_equal(idx.data(), idx_twin.data(), static_cast<size_t>(n) * sizeof(int64_t));
    assert_close(maw, maw_twin);
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(refuses, forget),
      cmocka_unit_test_teardown(refuses_what_tickets_cannot_name, forget),
      cmocka_unit_test_teardown(takes_what_is_planned, forget),
      cmocka_unit_test_teardown(windows_grow_with_their_sequences, forget),
      cmocka_unit_test_teardown(windows_grow_up_to_the_cap, forget),
      cmocka_unit_test_teardown(windows_of_long_sequences_are_full, forget),
      cmocka_unit_test_teardown(takes_nothing_later, forget),
      cmocka_unit_test_teardown(survives_failing_calls, forget),
      cmocka_unit_test_teardown(survives_failing_calls_that_select, forget),
      cmocka_unit_test_teardown(takes_long_appends_back, forget),
      cmocka_unit_test_teardown(takes_back_what_selects, forget),
      cmocka_unit_test_teardown(finds_a_sequence_again, forget),
      cmocka_unit_test_teardown(forgets_what_is_overwritten, forget),
      cmocka_unit_test_teardown(loses_nothing_twice, forget),
      cmocka_unit_test_teardown(windows_may_be_empty, forget),
      cmocka_unit_test_teardown(queries_may_be_apart, forget),
      cmocka_unit_test_teardown(caps_hold, forget),
      cmocka_unit_test_teardown(nan_goes_where_it_is_seen, forget),
      cmocka_unit_test_teardown(a_lost_device_is_called_lost, forget),
      cmocka_unit_test_teardown(loses_the_device, forget),
      cmocka_unit_test_teardown(loses_the_device_that_has_maw, forget),
      cmocka_unit_test_teardown(windows_grow_for_a_layer_that_is_ahead, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
