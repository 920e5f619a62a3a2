// SPDX-License-Identifier: MIT
// Keys that the CPU attends and keys that cross the bus in one call, through the C ABI, on the stand-in: how they are shared
// out and counted. stream_route_test checks refusals and failures for all routes that stream. device_stream_test checks
// numbers in all circumstances. Here a twin without a device gives the expected numbers.
#include <thread>

#include "device/device_side.h"
#include "device/gate.h"

using namespace tandem_test;

namespace {

constexpr int64_t kTokenBytes = kKvHeads * kDim * 2 * 2;
constexpr int64_t kBuffer = 64 * kDim * 2 * 2 * 3 / 2;  // one and a half times 64 tokens of one KV head

struct Both : Side {
  explicit Both(double fraction, int64_t buffer_bytes = kBuffer, int64_t cap = 0) : Side(true, "all", cap) {
    tandem_session_options options = options_of("all");
    options.route = "host+stream";
    options.stream_fraction = fraction;
    options.stream_buffer_bytes = buffer_bytes;
    change_session(this, options);
  }
};

void append_both(const Side& side, const Side& twin, int64_t n, int64_t seed) {
  for (const Side* one : {&side, &twin}) {
    const Tensor k({n, kKvHeads, kDim}, seed), v({n, kKvHeads, kDim}, seed + 1);
    OK(tandem_sequence_append, one->cache, one->sequence, kLayer, &k.view, &v.view, nullptr);
  }
}

// Each key outside the window goes to the CPU or the bus, in units of 16 tokens, whatever the device does meanwhile.
void shares_out_what_is_outside(void**) {
  for (const int64_t delay_ns : {0, 100'000})
    for (const double fraction : {0.0, 0.1, 0.5, 0.9, 1.0}) {
      const Both side(fraction);
      const Side twin(false);
      controls.set_delay(delay_ns);
      int64_t length = 0, streamed = 0, on_host = 0, n_joint = 0, seed = 1;
      for (const int64_t n : {200, 1, 1, 30, 130, 400, 1}) {
        attend_twins(side, twin, n, seed++);
        const int64_t outside = outside_of(length);
        const int64_t cut =
            fraction == 1.0 ? outside : (std::llround(fraction * static_cast<double>(outside)) + 8) / 16 * 16;
        const int64_t moved = fraction == 0.0 ? 0 : std::min(cut, outside);
        streamed += moved;
        on_host += outside - moved;
        n_joint += moved > 0 && moved < outside ? 1 : 0;
        length += n;
      }
      const tandem_session_stats stats = side.stats();
      assert_int_equal(stats.stream_part_tokens, streamed);
      assert_int_equal(stats.streamed_kv_bytes, streamed * kTokenBytes);
      assert_int_equal(stats.host_part_tokens, on_host);
      assert_int_equal(stats.n_joint_parts, n_joint);
      assert_int_equal(stats.host_kv_bytes_read, (streamed + on_host) * kTokenBytes);
      controls.set_delay(0);
    }
}

// The same calls give the same bits, however late the device is.
void is_the_same_each_time(void**) {
  std::vector<float> first;
  for (const int64_t delay_ns : {0, 50'000, 400'000}) {
    const Both side(0.4);
    const Side twin(false);
    append_both(side, twin, 900, 5);
    controls.set_delay(delay_ns);
    Call call(3, 2);
    call.to_device();
    attend(side, call);
    const std::vector<float> got = call.output();
    controls.set_delay(0);
    if (first.empty()) first = got;
    assert_memory_equal(got.data(), first.data(), got.size() * sizeof(float));
  }
}

// One call with sequences of all lengths, some with no key outside the window.
void takes_batches(void**) {
  const Both side(0.3);
  const Side twin(false);
  std::vector<int64_t> ids[2], q_lens;
  int64_t n_tokens = 0;
  for (const int64_t length : {0, 40, 100, 333, 1000}) {
    int i = 0;
    for (const Side* one : {static_cast<const Side*>(&side), &twin}) {
      int64_t id = 0;
      OK(tandem_sequence_create, &id, one->cache);
      const Tensor k({std::max<int64_t>(length, 1), kKvHeads, kDim}, length),
          v({std::max<int64_t>(length, 1), kKvHeads, kDim}, 9);
      if (length > 0) OK(tandem_sequence_append, one->cache, id, kLayer, &k.view, &v.view, nullptr);
      ids[i++].push_back(id);
    }
    q_lens.push_back(1 + length % 3);
    n_tokens += q_lens.back();
  }
  Call on_device(n_tokens, 3), on_host(n_tokens, 3);
  on_device.to_device();
  int i = 0;
  for (Call* call : {&on_device, &on_host}) {
    const Side& one = i == 0 ? static_cast<const Side&>(side) : twin;
    tandem_attend_args args = call->args(one);
    args.n_sequences = static_cast<int32_t>(q_lens.size());
    args.sequences = ids[i++].data();
    args.q_lens = q_lens.data();
    OK(tandem_attend, one.session, &args);
  }
  assert_close(on_device.output(), on_host.output());
  const tandem_session_stats stats = side.stats();
  assert_int_equal(stats.n_joint_parts, 2);  // of the last append, and of the calls before it
  assert_int_equal(stats.host_part_tokens + stats.stream_part_tokens, outside_of(100) + outside_of(333) + outside_of(1000));
}

// ---- "auto" ------------------------------------------------------------------------------------------------------------

constexpr int64_t kLong = 20'000;

struct Auto : Side {
  explicit Auto(const char* route = "auto") : Side(true) {
    tandem_session_options options = options_of("all");
    options.route = route;
    options.stream_buffer_bytes = int64_t{1} << 20;
    change_session(this, options);
  }
  tandem_route_plan plan(int64_t kv_len, int64_t q_len) const {
    tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
    OK(tandem_plan, &plan, session, kLayer, &kv_len, &q_len, 1);
    return plan;
  }
};

// How many keys each side gets depends on this machine. But every key has a side, and the plan is compared with the time
// that calls take.
void auto_shares_out(void**) {
  const Auto side;
  const Side twin(false);
  append_both(side, twin, kLong, 1);
  int64_t outside = 0;
  for (int64_t call = 0; call < 8; ++call) {
    attend_twins(side, twin, 64, call);
    outside += outside_of(kLong + 64 * call);
    const tandem_session_stats stats = side.stats();
    assert_int_equal(stats.n_planned_parts, call + 1);
    assert_int_equal(stats.host_part_tokens + stats.stream_part_tokens, outside);
  }
  const tandem_session_stats stats = side.stats();
  assert_true(stats.predicted_part_ns > 0 && stats.planned_part_ns > 0);
  assert_true(stats.n_joint_parts <= stats.n_stream_parts && stats.n_joint_parts <= stats.n_host_parts);
  assert_int_equal(stats.streamed_kv_bytes, stats.stream_part_tokens * kTokenBytes);
}

void plans_add_up(void**) {
  const Auto both, host("host"), stream("stream");
  for (const int64_t kv_len : {0, 1, 100, 20'000, 300'000})
    for (const int64_t q_len : {1, 64}) {
      if (q_len > kv_len && kv_len > 0) continue;
      const int64_t n = std::min(q_len, kv_len), outside = kv_len > 0 ? outside_of(kv_len - n) : 0;
      if (kv_len == 0 && q_len > 1) continue;
      for (const Auto* side : {&both, &host, &stream}) {
        tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
        const int64_t* q_lens = kv_len == 0 ? nullptr : &q_len;
        OK(tandem_plan, &plan, side->session, kLayer, &kv_len, q_lens, 1);
        assert_int_equal(plan.resident_tokens + plan.host_tokens + plan.stream_tokens, kv_len);
        assert_int_equal(plan.host_tokens + plan.stream_tokens, outside);
        assert_int_equal(plan.host_bytes, plan.host_tokens * kTokenBytes);
        assert_int_equal(plan.stream_bytes, plan.stream_tokens * kTokenBytes);
        assert_int_equal(plan.total_ns, std::max({plan.host_ns, plan.bus_ns, plan.device_ns}));
        assert_true((plan.total_ns > 0) == (outside > 0));
        assert_true((plan.host_ns > 0) == (plan.host_tokens > 0));
        if (side == &host) assert_int_equal(plan.stream_tokens, 0);
        if (side == &stream) assert_int_equal(plan.host_tokens, 0);
        if (side == &host) assert_int_equal(plan.total_ns, plan.host_alone_ns);
        if (side == &stream) assert_int_equal(plan.total_ns, plan.stream_alone_ns);
        if (side == &both) assert_true(plan.total_ns <= plan.host_alone_ns);
      }
    }
  // The plan of several sequences is their sum.
  const int64_t kv_lens[] = {20'000, 30'000, 10};
  tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
  OK(tandem_plan, &plan, both.session, kLayer, kv_lens, nullptr, 3);
  assert_int_equal(plan.host_tokens + plan.stream_tokens, outside_of(19'999) + outside_of(29'999));
}

// If the last call's queries were long in coming, the next call's may be, too. Keys that the bus brings meanwhile, as far as
// buffers go, then take no time. Calls with other numbers of queries, and other sessions, do not use this.
void plans_know_what_comes_before_queries(void**) {
  constexpr auto kHeld = std::chrono::milliseconds(20);
  constexpr int64_t kLength = 300'000, kInBuffers = (int64_t{2} << 20) / kTokenBytes;
  const Auto side("stream");
  const Side twin(false);
  attend_twins(side, twin, kPrompt, 1);
  const auto ahead = [&](int64_t q_len) {
    const tandem_route_plan plan = side.plan(kLength, q_len);
    assert_int_equal(plan.stream_tokens, outside_of(kLength - q_len));
    return plan.bus_ns - plan.total_ns;
  };
  assert_int_equal(ahead(1), 0);
  attend_twins(side, twin, 1, 3);  // makes memory grow, so the next call need not wait for the device
  tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
  double in_buffers = 0.0;
  bool is_known = false;
  for (int64_t seed = 5; seed < 50 && !is_known; seed += 10) {  // another program may have the processors at times
    Call call(1, seed), on_host(1, seed);
    call.to_device();
    {
      stand_in::Gate gate(controls);
      attend(side, call);
      std::this_thread::sleep_for(kHeld);
      assert_false(gate.is_open());
    }
    attend(twin, on_host);
    assert_close(call.output(), on_host.output());
    plan = side.plan(kLength, 1);
    in_buffers = static_cast<double>(plan.bus_ns) * kInBuffers / static_cast<double>(plan.stream_tokens);
    const double least = std::min<double>(std::chrono::nanoseconds(kHeld).count(), in_buffers);
    is_known = static_cast<double>(ahead(1)) > 0.8 * least;  // the bus takes longer than its bytes alone
  }
  assert_true(is_known);
  assert_true(static_cast<double>(ahead(1)) < 1.01 * in_buffers);
  assert_true(plan.stream_alone_ns == plan.total_ns);
  assert_int_equal(ahead(64), 0);
  const Auto other("stream");
  const tandem_route_plan unknown = other.plan(kLength, 1);
  assert_int_equal(unknown.total_ns, unknown.bus_ns);
}

void plans_say_what_they_cannot(void**) {
  const Side side(true, "hgca");
  const int64_t kv_len = 1000;
  tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
  tandem_error* error = nullptr;
  assert_int_equal(tandem_plan(&plan, side.session, kLayer, &kv_len, nullptr, 1, &error), TANDEM_ERROR_UNSUPPORTED);
  assert_non_null(std::strstr(tandem_error_message(error), "hgca"));
  tandem_error_release(error);
  const Auto other;
  controls.fail_call(stand_in::kAllocate, 1, TANDEM_ERROR_OUT_OF_MEMORY);  // no memory to measure with
  assert_int_equal(tandem_plan(&plan, other.session, kLayer, &kv_len, nullptr, 1, &error), TANDEM_ERROR_OUT_OF_MEMORY);
  tandem_error_release(error);
  controls.fail_call(stand_in::kAllocate, INT64_MAX, TANDEM_OK);
  OK(tandem_plan, &plan, other.session, kLayer, &kv_len, nullptr, 1);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(shares_out_what_is_outside, forget),
      cmocka_unit_test_teardown(is_the_same_each_time, forget),
      cmocka_unit_test_teardown(takes_batches, forget),
      cmocka_unit_test_teardown(auto_shares_out, forget),
      cmocka_unit_test_teardown(plans_add_up, forget),
      cmocka_unit_test_teardown(plans_know_what_comes_before_queries, forget),
      cmocka_unit_test_teardown(plans_say_what_they_cannot, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
