// SPDX-License-Identifier: MIT
// The route "stream" through the C ABI, on the stand-in: refusals, the memory that is taken and counted, and what is left
// when something fails. device_stream_test checks numbers in all circumstances. Here a twin without a device gives the
// expected numbers.
#include <chrono>
#include <functional>
#include <thread>

#include "device/device_side.h"
#include "device/gate.h"

using namespace tandem_test;

namespace {

constexpr int64_t kTokenBytes = kKvHeads * kDim * 2 * 2;
constexpr int64_t kBuffer = 64 * kDim * 2 * 2 * 3 / 2;  // one and a half times 64 tokens of one KV head

tandem_session_options route_options(const char* route, int64_t buffer_bytes = kBuffer, int64_t window = kWindow) {
  tandem_session_options options = Side::options_of("all");
  options.window_tokens = window;
  options.route = route;
  options.stream_buffer_bytes = buffer_bytes;
  if (options.route == std::string("host+stream")) options.stream_fraction = 0.5;
  return options;
}

// The routes that stream. With the second one the CPU attends half of the keys.
constexpr const char* kStreaming[] = {"stream", "host+stream"};

// A side with a device whose session uses the route.
struct Streaming : Side {
  explicit Streaming(const char* route = "stream", int64_t buffer_bytes = kBuffer, int64_t cap = 0, int64_t window = kWindow)
      : Side(true, "all", cap) {
    change_session(this, route_options(route, buffer_bytes, window));
  }
};

void refuse(const Side& side, const std::function<void(tandem_session_options&)>& change, int32_t status, const char* field,
            const char* text) {
  tandem_session_options options = route_options("stream");
  change(options);
  refuse_session(side, options, status, field, text);
}

// The same plan gives the same bits. Routes other than "auto" cut the keys of a repeated step where they cut those of the
// step that was rolled back.
void repeats_a_step_bit_by_bit(void**) {
  constexpr int64_t kMany = 1500;
  for (const char* route : {"host", "stream", "host+stream"}) {
    const Side side(true, "all");
    Side other(side, "all");
    change_session(&other, route_options(route));
    Call prompt(kMany, 1), step(1, 2);
    OK(tandem_sequence_append, other.cache, other.sequence, kLayer, &prompt.k.view, &prompt.v.view, nullptr);
    step.to_device();
    attend(other, step);
    const std::vector<float> first = step.output();
    for (int i = 0; i < 3; ++i) {
      OK(tandem_sequence_truncate, other.cache, other.sequence, kMany);
      step.forget_output();
      attend(other, step);
      const std::vector<float> again = step.output();
      if (std::memcmp(first.data(), again.data(), first.size() * sizeof(float)) != 0) fail_msg("route %s", route);
    }
  }
}

void refuses_fractions(void**) {
  const Streaming side;
  const auto fraction = [](const char* route, double share) {
    return [=](auto& o) { o.route = route, o.stream_fraction = share; };
  };
  for (const double share : {-1.0, -0.1, 1.1, static_cast<double>(NAN), static_cast<double>(INFINITY)})
    refuse(side, fraction("host+stream", share), TANDEM_ERROR_INVALID_ARGUMENT, "stream_fraction", "from 0 to 1");
  for (const char* route : {"host", "stream", "auto"})
    refuse(side, fraction(route, 0.5), TANDEM_ERROR_INVALID_ARGUMENT, "stream_fraction", "alone");
  const Side without(false), rotating(true, "all", 0, 1, kWindow, TANDEM_ROPE_HALVES);
  refuse(without, fraction("host+stream", 0.5), TANDEM_ERROR_UNSUPPORTED, "route", "no device");
  refuse(rotating, fraction("host+stream", 0.5), TANDEM_ERROR_UNSUPPORTED, "route", "rotates the keys of layer 0");
}

void refuses_in(const char* route) {
  const Streaming side(route);
  const Side without(false);
  refuse(
      side, [](auto& o) { o.route = "fetch"; }, TANDEM_ERROR_NOT_FOUND, "route", "auto, host, stream, host+stream");
  refuse(
      side, [](auto& o) { o.route = ""; }, TANDEM_ERROR_INVALID_ARGUMENT, "route", "\"\"");
  refuse(
      side, [](auto& o) { o.policy = "streaming"; }, TANDEM_ERROR_UNSUPPORTED, "route", "sinks alone");
  refuse(
      side, [](auto& o) { o.stream_buffer_bytes = -1; }, TANDEM_ERROR_INVALID_ARGUMENT, "stream_buffer_bytes", "-1");
  refuse(
      side, [](auto& o) { o.stream_buffer_bytes = 100; }, TANDEM_ERROR_INVALID_ARGUMENT, "stream_buffer_bytes", "64 tokens");
  refuse(
      side, [](auto& o) { o.stream_buffer_bytes = INT64_MAX; }, TANDEM_ERROR_INVALID_ARGUMENT, "stream_buffer_bytes",
      "more than 2^40");
  refuse(
      side, [](auto& o) { o.append_tokens = -1; }, TANDEM_ERROR_INVALID_ARGUMENT, "append_tokens", "-1");
  refuse(
      side, [](auto& o) { o.append_tokens = int64_t{1} << 31; }, TANDEM_ERROR_INVALID_ARGUMENT, "append_tokens",
      "2147483648");
  refuse(
      side, [](auto& o) { o.stream_heads = -2; }, TANDEM_ERROR_INVALID_ARGUMENT, "stream_heads", "-2");
  refuse(
      without, [](auto&) {}, TANDEM_ERROR_UNSUPPORTED, "route", "no device");
  refuse_step(side);
  assert_int_equal(side.length(), 0);
  const Side twin(false);
  attend_twins(side, twin, kPrompt, 1);  // the session is as before
}

void refuses(void**) {
  for (const char* route : kStreaming) refuses_in(route);
}

// Appends and single queries, over hosts of many pieces, from a device that is late. Every byte is counted, and the CPU
// attends no key.
void streams_what_is_outside(void**) {
  for (const int64_t delay_ns : {0, 100'000})
    for (const int64_t buffer : {kBuffer, 5 * kBuffer, int64_t{1} << 20}) {
      const Streaming side("stream", buffer);
      const Side twin(false);
      controls.set_delay(delay_ns);
      int64_t bytes = 0, n_parts = 0, length = 0, seed = 1;
      for (const int64_t n : {200, 1, 1, 30, 1, 130, 700, 1}) {
        attend_twins(side, twin, n, seed++);
        const int64_t outside = outside_of(length);
        bytes += outside * kTokenBytes;
        n_parts += outside > 0 ? 1 : 0;
        length += n;
      }
      const tandem_session_stats stats = side.stats();
      assert_int_equal(stats.n_stream_parts, n_parts);
      assert_int_equal(stats.streamed_kv_bytes, bytes);
      assert_int_equal(stats.n_host_parts, 0);
      assert_true(stats.stream_part_ns > 0);
      tandem_cache_stats held = TANDEM_CACHE_STATS_INIT;
      OK(tandem_cache_get_stats, &held, side.cache);
      assert_int_equal(held.device_stream_bytes, 2 * ((buffer + 255) / 256 * 256));
      assert_true(held.pinned_bytes > 0 && held.pinned_bytes <= held.host_kv_bytes);
      controls.set_delay(0);
    }
}

// Another call gets a call's place in the ring once its rows have come and its keys were sent, even if the device has yet to
// attend them. The device must still read the first call's descriptors.
void keeps_descriptors_until_they_are_read(void**) {
  for (const int64_t buffer : {kBuffer, int64_t{1} << 20}) {
    const Streaming side("stream", buffer);
    const Side twin(false);
    attend_twins(side, twin, kPrompt, 1);
    attend_twins(side, twin, 1, 2);
    constexpr int kMany = 150;  // more than the ring has places
    std::vector<std::unique_ptr<Call>> calls;
    for (int i = 0; i < kMany; ++i) {
      calls.push_back(std::make_unique<Call>(1, 10 + i));
      calls.back()->to_device();
    }
    controls.set_delay(100'000);
    for (const auto& call : calls) attend(side, *call);
    for (int i = 0; i < kMany; ++i) {
      Call on_host(1, 10 + i);
      attend(twin, on_host);
      assert_close(calls[static_cast<size_t>(i)]->output(), on_host.output());
    }
    controls.set_delay(0);
  }
}

// Calls are made before the device has begun with earlier ones. Buffers are refilled again and again, and none too early.
void waits_for_nothing(void**) {
  const Streaming side;
  const Side twin(false);
  attend_twins(side, twin, kPrompt, 1);
  attend_twins(side, twin, 1, 2);
  constexpr int kSteps = 6;
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < kSteps; ++i) {
    calls.push_back(std::make_unique<Call>(1, 10 + i));
    calls.back()->to_device();
  }
  const int64_t n_waits = counts.n_waits;
  controls.set_delay(2'000'000);
  stand_in::Gate gate(controls);
  for (const auto& call : calls) attend(side, *call);
  assert_false(gate.is_open());
  assert_int_equal(counts.n_waits, n_waits);
  gate.open();
  for (int i = 0; i < kSteps; ++i) {
    Call on_host(1, 10 + i);
    attend(twin, on_host);
    assert_close(calls[static_cast<size_t>(i)]->output(), on_host.output());
  }
  controls.set_delay(0);
}

// Pages in flight keep their contents, whatever other calls do meanwhile.
void holds_its_pages_in(const char* route) {
  const Streaming side(route);
  const Side twin(false);
  attend_twins(side, twin, 600, 1);
  Call late(2, 2), on_host(2, 2);
  late.to_device();
  controls.set_delay(3'000'000);
  attend(side, late);
  OK(tandem_sequence_truncate, side.cache, side.sequence, 0);
  const Tensor k({600, kKvHeads, kDim}, 50), v({600, kKvHeads, kDim}, 51);
  OK(tandem_sequence_append, side.cache, side.sequence, kLayer, &k.view, &v.view, nullptr);
  controls.set_delay(0);
  attend(twin, on_host);
  assert_close(late.output(), on_host.output());
}

void holds_its_pages(void**) {
  for (const char* route : kStreaming) holds_its_pages_in(route);
}

void takes_what_is_planned(void**) {
  for (const int64_t length : {200, 1000}) {
    const Streaming side;
    const Tensor k({length - 1, kKvHeads, kDim}, 1), v({length - 1, kKvHeads, kDim}, 2);
    OK(tandem_sequence_append, side.cache, side.sequence, kLayer, &k.view, &v.view, nullptr);
    Call call(1, 3);
    call.to_device();
    attend(side, call);
    tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
    const tandem_session_options options = route_options("stream");
    OK(tandem_plan_memory, &plan, side.engine, side.model, nullptr, &options, &length, 1);
    assert_never_more(side, plan);
    const tandem_session_options host = route_options("host");
    OK(tandem_plan_memory, &plan, side.engine, side.model, nullptr, &host, &length, 1);
    assert_int_equal(plan.device_stream_bytes, 0);
  }
}

// Every call of the device fails in turn while a call starts. The call reports the failure, no sequence grows, and the next
// try succeeds.
void survives_failing_calls_in(const char* route) {
  using namespace stand_in;
  for (const stand_in::Call failing : {kAllocate, kAllocateShared, kCopy, kFill, kWait, kAppend, kAttend, kMerge,
                                       kAccumulate, kCreateStream, kCreateEvent, kRecordEvent, kWaitEvent, kCopyStrided}) {
    int n_failed = 0;
    for (int64_t nth = 1;; ++nth) {
      const Streaming side(route);
      const Side twin(false);
      for (const Side* one : {static_cast<const Side*>(&side), &twin}) {
        const Tensor k({300, kKvHeads, kDim}, 1), v({300, kKvHeads, kDim}, 2);
        OK(tandem_sequence_append, one->cache, one->sequence, kLayer, &k.view, &v.view, nullptr);
      }
      tandem_test::Call call(3, 2), call_host(3, 2);
      call.to_device();
      const int32_t status = attend_failing(side, call.args(side), failing, nth, nth % 2 * 200'000);
      if (status != TANDEM_OK) {
        ++n_failed;
        assert_int_equal(status, TANDEM_ERROR_BACKEND);
        assert_int_equal(side.length(), 300);
        attend(side, call);
      }
      attend(twin, call_host);
      assert_close(call.output(), call_host.output());
      attend_twins(side, twin, 2, 7);
      controls.set_delay(0);
      if (status == TANDEM_OK) break;
    }
    if (n_failed == 0) fail_msg("call %d was never made to fail", failing);
  }
}

void survives_failing_calls(void**) {
  for (const char* route : kStreaming) survives_failing_calls_in(route);
}

// Memory that cannot be pinned is streamed all the same.
void streams_what_cannot_be_pinned(void**) {
  const Streaming side;
  const Side twin(false);
  controls.fail_call(stand_in::kPin, 1, TANDEM_ERROR_OUT_OF_MEMORY);
  for (const int64_t n : {200, 1, 40}) attend_twins(side, twin, n, n);
  controls.fail_call(stand_in::kPin, INT64_MAX, TANDEM_OK);
  assert_int_equal(side.stats().n_stream_parts, 2);
  tandem_cache_stats held = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &held, side.cache);
  assert_int_equal(held.pinned_bytes, 0);
}

void caps_hold(void**) {
  constexpr int64_t kCap = int64_t{8} << 20;
  const Streaming side("stream", 16 << 20, kCap);
  Call first(kPrompt, 1), call(1, 2);
  first.to_device();
  call.to_device();
  attend(side, first);  // no key is outside the window when it begins
  const tandem_attend_args args = call.args(side);
  tandem_error* error = nullptr;
  assert_int_equal(tandem_attend(side.session, &args, &error), TANDEM_ERROR_CAPACITY);
  assert_string_equal(tandem_error_field(error), "device_cap_bytes");
  tandem_error_release(error);
  assert_int_equal(side.length(), kPrompt);
}

// Rows that had arrived are there, and the host goes on.
void loses_the_device_in(const char* route) {
  for (const int64_t after_ns : {0, 1'000'000, 5'000'000}) {
    const Streaming side(route);
    const Side twin(false);
    attend_twins(side, twin, 400, 1);
    controls.set_delay(500'000);
    Call late(1, 2);
    late.to_device();
    attend(side, late);
    std::this_thread::sleep_for(std::chrono::nanoseconds(after_ns));
    controls.lose_device();
    uint64_t digest = 0;
    OK(tandem_sequence_digest, &digest, side.cache, side.sequence);
    const int64_t n_arrived = side.stats().staged_kv_bytes / kTokenBytes;
    assert_int_equal(side.length(), n_arrived);
    Call again(1, 2), again_host(1, 2);
    if (side.length() == 400) {
      attend(side, again);
      attend(twin, again_host);
      assert_close(again.output(), again_host.output());
    }
    controls.reset();
  }
}

void loses_the_device(void**) {
  for (const char* route : kStreaming) loses_the_device_in(route);
}

// Makes a call with n queries in a session with the route "auto", over a host of a few MiB whose bus has this delay. Returns
// the session's counts.
tandem_session_stats choose(int64_t n, int64_t delay_ns, int64_t cap = 0, bool can_pin = true) {
  constexpr int64_t kLong = 10'000, kMiB = int64_t{1} << 20;
  Streaming side("auto", cap > 0 ? cap : kMiB, cap);
  const Side twin(false);
  attend_twins(side, twin, kPrompt, 3);
  attend_twins(side, twin, 1, 4);
  assert_int_equal(side.stats().n_host_parts, 1);  // a few KiB are not worth a plan
  for (const Side* one : {static_cast<const Side*>(&side), &twin}) {
    const Tensor k({kLong, kKvHeads, kDim}, 1), v({kLong, kKvHeads, kDim}, 2);
    OK(tandem_sequence_append, one->cache, one->sequence, kLayer, &k.view, &v.view, nullptr);
  }
  Call call(n, 5), on_host(n, 5);
  call.to_device();
  controls.set_delay(delay_ns);
  if (!can_pin) controls.fail_call(stand_in::kPin, 1, TANDEM_ERROR_OUT_OF_MEMORY);
  attend(side, call);
  attend(twin, on_host);
  assert_close(call.output(), on_host.output());
  controls.set_delay(0);
  const tandem_session_stats stats = side.stats();
  assert_int_equal(stats.n_stream_parts + stats.n_host_parts - stats.n_joint_parts, 2);
  tandem_cache_stats held = TANDEM_CACHE_STATS_INIT;  // no memory is taken or pinned for a route that is not used
  OK(tandem_cache_get_stats, &held, side.cache);
  if (can_pin) assert_int_equal(held.pinned_bytes > 0, stats.n_stream_parts > 0);
  if (can_pin) assert_int_equal(held.device_stream_bytes > 0, stats.n_stream_parts > 0);
  return stats;
}

// The choice rests on trials, which look slow when a thread has to wait for a core. So the choice must occur in at least one
// of several engines. auto_rebuild_test and planner_test check the choice for given times.
template <typename Choice>
bool is_chosen(Choice choice) {
  for (int i = 0; i < 6; ++i)
    if (choice()) return true;
  return false;
}

void chooses_what_takes_less(void**) {
  // Much to compute and a bus as fast as memory; then little to compute and 100 ms for a MiB.
  assert_true(is_chosen([] { return choose(128, 0).n_stream_parts == 1; }));
  assert_true(is_chosen([] { return choose(1, 100'000'000).n_stream_parts == 0; }));
}

// The store has the keys before their rotation, so they cannot be streamed. "stream" is refused, "auto" leaves them to the
// CPU.
void rotated_keys_stay(void**) {
  Side side(true, "all", 0, 1, kWindow, TANDEM_ROPE_HALVES), twin(false, "all", 0, 1, kWindow, TANDEM_ROPE_HALVES);
  refuse(
      side, [](auto&) {}, TANDEM_ERROR_UNSUPPORTED, "route", "rotates the keys of layer 0");
  change_session(&side, route_options("auto"));
  attend_twins(side, twin, kPrompt, 2);
  attend_twins(side, twin, 1, 3);
}

void goes_without(void**) {
  assert_int_equal(choose(128, 0, int64_t{4} << 20).n_stream_parts, 0);  // no memory for the buffers
  assert_int_equal(choose(128, 0, 0, false).n_stream_parts, 0);          // nothing can be pinned
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(refuses, forget),
      cmocka_unit_test_teardown(refuses_fractions, forget),
      cmocka_unit_test_teardown(repeats_a_step_bit_by_bit, forget),
      cmocka_unit_test_teardown(streams_what_is_outside, forget),
      cmocka_unit_test_teardown(keeps_descriptors_until_they_are_read, forget),
      cmocka_unit_test_teardown(waits_for_nothing, forget),
      cmocka_unit_test_teardown(holds_its_pages, forget),
      cmocka_unit_test_teardown(takes_what_is_planned, forget),
      cmocka_unit_test_teardown(survives_failing_calls, forget),
      cmocka_unit_test_teardown(streams_what_cannot_be_pinned, forget),
      cmocka_unit_test_teardown(caps_hold, forget),
      cmocka_unit_test_teardown(loses_the_device, forget),
      cmocka_unit_test_teardown(chooses_what_takes_less, forget),
      cmocka_unit_test_teardown(goes_without, forget),
      cmocka_unit_test_teardown(rotated_keys_stay, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
