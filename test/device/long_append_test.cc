// SPDX-License-Identifier: MIT
// Long appends over streamed keys, on the stand-in: chunks longer and shorter than window and tickets, the memory that they
// take, and what is left when something fails. device_stream_test checks numbers in all circumstances.
#include <array>
#include <chrono>
#include <thread>

#include "device/device_side.h"
#include "one_in.h"

using namespace tandem_test;

namespace {

constexpr int64_t kTokenBytes = kKvHeads * kDim * 2 * 2;
constexpr int64_t kBuffer = 64 * kDim * 2 * 2 * 3 / 2;  // one and a half times 64 tokens of one KV head

struct Terms {
  int64_t append_tokens = 0, heads = 0, buffer_bytes = kBuffer, window = kWindow;
};

tandem_session_options stream_options(const Terms& terms) {
  tandem_session_options options = Side::options_of("all");
  options.window_tokens = terms.window;
  options.route = "stream";
  options.stream_buffer_bytes = terms.buffer_bytes;
  options.append_tokens = terms.append_tokens;
  options.stream_heads = terms.heads;
  return options;
}

struct Streaming : Side {
  explicit Streaming(const Terms& terms, int64_t cap = 0, int32_t n_layers = 1) : Side(true, "all", cap, n_layers) {
    change_session(this, stream_options(terms));
  }
};

// Returns the length of the next chunk of an append of n tokens: of tickets, or of equal parts.
int64_t chunk_len(int64_t left, int64_t n, int64_t append_tokens) {
  const int64_t most = append_tokens == 0 ? 16384 : append_tokens, unit = std::min<int64_t>(512, most);
  const int64_t whole = std::max(unit, most / unit * unit), parts = (n + whole - 1) / whole;
  const int64_t equal = ((n + parts - 1) / parts + unit - 1) / unit * unit;
  return left > std::min<int64_t>(equal, 512) ? std::min(left, equal) : std::min<int64_t>(left, 512);
}

// Appends in several layers that share one ring: windows shorter and longer than chunks, buffers for few and many keys, keys
// in the ring and in the work space, shared pages.
void chunks_of_all_lengths(void**) {
  tandem::test::TakesOneIn is_taken;
  for (const Terms& terms : {Terms{}, Terms{100, 1}, Terms{512, 2, 5 * kBuffer, 300}, Terms{1024, 0, 1 << 20, 0},
                             Terms{33, 0, kBuffer, 1}, Terms{600, 1, 3 * kBuffer, 130}}) {
    if (!is_taken()) continue;
    const Streaming side(terms, 0, 2);
    const Side twin(false, "all", 0, 2, terms.window);
    const int64_t block = std::max<int64_t>(1, std::min<int64_t>(terms.window / 8, 128));
    int64_t bytes = 0, n_parts = 0, length = 0, window_begin = 0, seed = 1;
    for (const int64_t n : {600, 1, 1100, 3, 128, 700}) {
      Call calls[] = {Call(n, seed), Call(n, seed)};
      calls[0].to_device();
      for (const int32_t layer : {0, 1}) {
        attend(side, calls[0], layer);
        attend(twin, calls[1], layer);
        assert_close(calls[0].output(), calls[1].output());
      }
      ++seed;
      for (int64_t left = n; left > 0;) {
        const int64_t over = length - window_begin - terms.window;
        if (over >= block) window_begin += over / block * block;
        bytes += 2 * window_begin * kTokenBytes;
        n_parts += window_begin > 0 ? 2 : 0;
        const int64_t len = length > 0 || n > 512 ? chunk_len(left, n, terms.append_tokens) : left;
        length += len;
        left -= len;
      }
    }
    const tandem_session_stats stats = side.stats();
    assert_int_equal(stats.n_host_parts, 0);
    assert_int_equal(stats.n_stream_parts, n_parts);
    assert_int_equal(stats.streamed_kv_bytes, bytes);
    assert_int_equal(stats.n_query_tokens, 2 * length);
  }
}

// The counted time begins when the copies are asked for, also for the first call that streams and for a call behind others.
void counts_its_time(void**) {
  const Streaming side({});
  Call calls[] = {Call(900, 1), Call(900, 2), Call(1, 3), Call(900, 4)};
  const auto begin = std::chrono::steady_clock::now();
  for (Call& call : calls) {
    call.to_device();
    attend(side, call);
    call.output();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const int64_t ns = side.stats().stream_part_ns;
  const std::chrono::nanoseconds spent = std::chrono::steady_clock::now() - begin - 4 * std::chrono::milliseconds(20);
  assert_in_range(ns, 1, spent.count());
}

// Several sequences in a call: some have long appends, some share a chunk.
void batches(void**) {
  const Streaming side({});
  const Side twin(false);
  int64_t ids[2][3] = {{side.sequence}, {twin.sequence}};
  for (int i = 1; i < 3; ++i) {
    OK(tandem_sequence_create, &ids[0][i], side.cache);
    OK(tandem_sequence_create, &ids[1][i], twin.cache);
  }
  int64_t seed = 1;
  for (const std::array<int64_t, 3>& lens : {std::array<int64_t, 3>{200, 700, 100}, {1, 0, 1}, {530, 20, 900}, {1, 1, 1}}) {
    const int64_t n = lens[0] + lens[1] + lens[2];
    Call calls[] = {Call(n, seed), Call(n, seed)};
    calls[0].to_device();
    for (int i = 0; i < 2; ++i) {
      const Side& one = i == 0 ? static_cast<const Side&>(side) : twin;
      tandem_attend_args args = calls[i].args(one);
      args.n_sequences = 3;
      args.sequences = ids[i];
      args.q_lens = lens.data();
      OK(tandem_attend, one.session, &args);
    }
    assert_close(calls[0].output(), calls[1].output());
    ++seed;
  }
}

void takes_what_is_planned(void**) {
  for (const int64_t appended : {1, 40, 512, 700, 2000})
    for (const int64_t buffer : {kBuffer, int64_t{1} << 20}) {
      const Terms terms{appended, 0, buffer};
      const Streaming side(terms, 0, 2);
      const int64_t before = 900, length = before + appended;
      const Tensor k({before, kKvHeads, kDim}, 1), v({before, kKvHeads, kDim}, 2);
      for (const int32_t layer : {0, 1})
        OK(tandem_sequence_append, side.cache, side.sequence, layer, &k.view, &v.view, nullptr);
      tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
      const tandem_session_options options = stream_options(terms);
      OK(tandem_plan_memory, &plan, side.engine, side.model, nullptr, &options, &length, 1);
      Call call(appended, 3);
      call.to_device();
      for (const int32_t layer : {0, 1}) attend(side, call, layer);
      assert_never_more(side, plan);
    }
}

// Appends whose chunks find many keys teach the plan how long the device takes, if that is more than a trial or assumption
// said.
void plans_go_by_what_appends_took(void**) {
  constexpr int64_t kBefore = 13'000, kAppended = 600;
  const Streaming side({1024, 0, 16 * kBuffer, 16});
  const Tensor k({kBefore, kKvHeads, kDim}, 1), v({kBefore, kKvHeads, kDim}, 2);
  OK(tandem_sequence_append, side.cache, side.sequence, kLayer, &k.view, &v.view, nullptr);
  const int64_t length = kBefore + kAppended, q_len = kAppended;
  const auto planned_ns = [&] {
    tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
    OK(tandem_plan, &plan, side.session, kLayer, &length, &q_len, 1);
    return static_cast<double>(plan.device_ns);
  };
  Call call(kAppended, 3);
  call.to_device();
  const auto begin = std::chrono::steady_clock::now();
  attend(side, call);
  call.output();
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
  const double planned = planned_ns();  // no trial, because a time is known
  if (!(planned > 0.5 * taken.count() && planned < 1.5 * taken.count()))
    fail_msg("%g ns were planned of %g", planned, taken.count());
}

// Failures in the first chunk, between chunks and in the last one roll everything back.
void takes_all_chunks_back(void**) {
  using namespace stand_in;
  constexpr int64_t kBefore = 200, kAppended = 420;
  const Tensor k({kBefore, kKvHeads, kDim}, 1), v({kBefore, kKvHeads, kDim}, 2);
  const auto append = [&](const Side& side) {
    OK(tandem_sequence_append, side.cache, side.sequence, kLayer, &k.view, &v.view, nullptr);
  };
  const Side twin(false);
  append(twin);
  const RetriedCalls calls(twin, kAppended, 2);
  const auto make = [&] {
    auto side = std::make_unique<Streaming>(Terms{150, 1});
    append(*side);
    return side;
  };
  take_back_what_fails(
      {kAllocateShared, kCopy, kFill, kAppend, kAttend, kMerge, kAccumulate, kRecordEvent, kWaitEvent, kCopyStrided}, calls,
      make, [](int64_t nth) { return nth + (nth + 3) / 4 + tandem::test::one_in() - 1; });
}

// tandem_plan() describes the last part of an append, which may be the whole append.
void is_planned(void**) {
  constexpr int64_t kBefore = 1500, kAppended = 1300, kLength = kBefore + kAppended;
  struct Case {
    int64_t append_tokens, last_part;
  };
  for (const Case& one : {Case{0, kAppended}, Case{1024, kAppended - 1024}}) {
    const Streaming side({one.append_tokens});
    const Side twin(false);
    attend_twins(side, twin, kBefore, 1);
    const int64_t before = side.stats().streamed_kv_bytes, outside = outside_of(kLength - one.last_part);
    tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
    OK(tandem_plan, &plan, side.session, kLayer, &kLength, &kAppended, 1);
    attend_twins(side, twin, kAppended, 2);
    const int64_t first_parts = one.last_part < kAppended ? outside_of(kBefore) * kTokenBytes : 0;
    assert_int_equal(plan.stream_bytes, side.stats().streamed_kv_bytes - before - first_parts);
    assert_int_equal(plan.stream_tokens, outside);
    assert_int_equal(plan.resident_tokens, kLength - outside);
    assert_int_equal(plan.host_tokens, 0);
    assert_true(plan.total_ns <= std::max(plan.bus_ns, plan.device_ns));  // pieces that come before the queries take no time
    if (one.last_part > 512) assert_int_equal(plan.total_ns, std::max(plan.bus_ns, plan.device_ns));
    assert_true(plan.bus_ns > 0);
    assert_true((plan.device_ns > 0) == (one.last_part > 512));  // work of tickets hides behind the bus
  }
}

// A cap leaves no memory for a trial of the kernels, so the plan uses an assumed time. It grows with the keys and with the
// queries.
void is_planned_without_a_trial(void**) {
  const auto device_ns_of = [](const Side& side, int64_t length, int64_t appended) {
    tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
    OK(tandem_plan, &plan, side.session, kLayer, &length, &appended, 1);
    return plan.device_ns;
  };
  constexpr int64_t kCap = int64_t{1} << 20;
  const Streaming side({}, kCap);
  assert_true(device_ns_of(side, 10'000, 1000) > 0);
  assert_true(device_ns_of(side, 20'000, 1000) > device_ns_of(side, 10'000, 1000));
  assert_int_equal(device_ns_of(side, 20'000, 1000), device_ns_of(Streaming({}, kCap), 20'000, 1000));  // neither was timed
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, side.cache);
  assert_in_range(stats.device_peak_bytes, 0, kCap);
}

// The host's store is full before the append has ended.
void host_cap_holds(void**) {
  Streaming side({});
  tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
  cache_options.host_cap_bytes = 3 * 2048 * kTokenBytes / 2;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  int64_t sequence = 0;
  OK(tandem_cache_create, &cache, side.engine, side.model, &cache_options);
  const tandem_session_options options = stream_options({});
  OK(tandem_session_create, &session, cache, &options);
  OK(tandem_sequence_create, &sequence, cache);
  std::swap(side.cache, cache);
  std::swap(side.session, session);
  std::swap(side.sequence, sequence);
  const Side twin(false);
  attend_twins(side, twin, 700, 1);
  const uint64_t before = side.digest();
  Call call(2000, 2);
  call.to_device();
  const tandem_attend_args args = call.args(side);
  tandem_error* error = nullptr;
  assert_int_equal(tandem_attend(side.session, &args, &error), TANDEM_ERROR_CAPACITY);
  assert_string_equal(tandem_error_field(error), "host_cap_bytes");
  tandem_error_release(error);
  assert_int_equal(side.length(), 700);
  assert_true(side.digest() == before);
  attend_twins(side, twin, 600, 3);
  tandem_session_release(session);
  tandem_cache_release(cache);
}

// Without memory for a chunk, keys cross the bus once for each ticket. The output is the same.
void goes_without(void**) {
  constexpr int64_t kBefore = 2000, kAppended = 1200;
  const Terms terms{kAppended, 0, kBuffer};
  const Side twin(false);
  const Streaming without(terms);
  const int64_t length = kBefore + kAppended;
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const tandem_session_options options = stream_options(terms);
  OK(tandem_plan_memory, &plan, without.engine, without.model, nullptr, &options, &length, 1);
  const Streaming side(terms, plan.device_window_bytes + plan.device_work_bytes + plan.device_stream_bytes - 1);
  for (const Side* one : {static_cast<const Side*>(&side), &twin}) {
    const Tensor k({kBefore, kKvHeads, kDim}, 1), v({kBefore, kKvHeads, kDim}, 2);
    OK(tandem_sequence_append, one->cache, one->sequence, kLayer, &k.view, &v.view, nullptr);
  }
  attend_twins(side, twin, kAppended, 3);
  assert_int_equal(side.stats().n_stream_parts, 3);
  attend_twins(side, twin, 3, 4);
}

// With memory for groups of only one KV head, as after an append to more keys, chunks keep their length.
void keeps_to_smaller_groups(void**) {
  constexpr int64_t kBefore = 2000, kAppended = 1024, kLarge = int64_t{1} << 20, kLength = kBefore + kAppended;
  const auto plan_of = [&](const Side& side, int64_t heads) {
    tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
    const tandem_session_options options = stream_options({kAppended, heads, kLarge});
    OK(tandem_plan_memory, &plan, side.engine, side.model, nullptr, &options, &kLength, 1);
    return plan;
  };
  const Terms terms{kAppended, 0, kLarge};
  const Side twin(false);
  const Streaming without(terms);
  const tandem_memory_plan plan = plan_of(without, 1);
  assert_true(planned_bytes(plan) < planned_bytes(plan_of(without, 0)));
  const Streaming side(terms, planned_bytes(plan));
  for (const Side* one : {static_cast<const Side*>(&side), &twin}) {
    const Tensor k({kBefore, kKvHeads, kDim}, 1), v({kBefore, kKvHeads, kDim}, 2);
    OK(tandem_sequence_append, one->cache, one->sequence, kLayer, &k.view, &v.view, nullptr);
  }
  attend_twins(side, twin, kAppended, 3);
  assert_int_equal(side.stats().n_stream_parts, 1);
  assert_never_more(side, plan);
  attend_twins(side, twin, 3, 4);
}

// A session that loses its device during the append keeps the rows that had arrived, whole layers or not.
void loses_the_device(void**) {
  for (const int64_t after_ns : {0, 3'000'000, 10'000'000}) {
    const Streaming side({});
    const Side twin(false);
    attend_twins(side, twin, 200, 1);
    controls.set_delay(500'000);
    Call late(1100, 2);
    late.to_device();
    attend(side, late);
    std::this_thread::sleep_for(std::chrono::nanoseconds(after_ns));
    controls.lose_device();
    side.digest();
    assert_int_equal(side.length(), side.stats().staged_kv_bytes / kTokenBytes);
    controls.reset();
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(chunks_of_all_lengths, forget),
      cmocka_unit_test_teardown(counts_its_time, forget),
      cmocka_unit_test_teardown(batches, forget),
      cmocka_unit_test_teardown(plans_go_by_what_appends_took, forget),
      cmocka_unit_test_teardown(takes_what_is_planned, forget),
      cmocka_unit_test_teardown(takes_all_chunks_back, forget),
      cmocka_unit_test_teardown(is_planned, forget),
      cmocka_unit_test_teardown(is_planned_without_a_trial, forget),
      cmocka_unit_test_teardown(host_cap_holds, forget),
      cmocka_unit_test_teardown(goes_without, forget),
      cmocka_unit_test_teardown(keeps_to_smaller_groups, forget),
      cmocka_unit_test_teardown(loses_the_device, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
