// SPDX-License-Identifier: MIT
// The route "recompute" through the C ABI, on the stand-in: refusals, the bytes that cross the bus, the memory that is taken
// and counted, and what is left when something fails. A twin in double precision makes keys and values from hidden states by
// the projection, so the device's rebuilt rows must be those of the cache. Some tests store other keys in the cache, to tell
// which of the two were attended.
#include <cmath>
#include <cstring>
#include <functional>

#include "device/hidden_side.h"
#include "one_in.h"

using namespace tandem_test;

namespace {

void refuse(const Side& side, const std::function<void(tandem_session_options&)>& change, int32_t status, const char* field,
            const char* text) {
  tandem_session_options options = route_options();
  change(options);
  refuse_session(side, options, status, field, text);
}

// Returns how many of `outside` tokens are rebuilt: whole pages.
int64_t rebuilt_of(int64_t outside, double share) {
  const auto wanted = static_cast<int64_t>(std::ceil(share * static_cast<double>(outside)));
  return std::min(outside, (wanted + 127) / 128 * 128);
}

void refuses(void**) {
  constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT, kUnsupported = TANDEM_ERROR_UNSUPPORTED;
  const Projected projected;
  const Rebuilding side(projected), without(projected, 1.0, kBuffer, false);
  const Side plain(true);  // no projection
  refuse(
      plain, [](auto&) {}, kUnsupported, "route", "layer 0 has no projection");
  refuse(
      without, [](auto&) {}, kUnsupported, "route", "route = \"recompute\": the engine has no device");
  refuse(
      side, [](auto& o) { o.policy = "hgca"; }, kUnsupported, "route", "attend all of them");
  refuse(
      side, [](auto& o) { o.stream_buffer_bytes = 1 << 13; }, kInvalid, "stream_buffer_bytes", "128 hidden states");
  for (const double share : {-0.5, 1.5, static_cast<double>(NAN)})
    refuse(
        side, [&](auto& o) { o.recompute_share = share; }, kInvalid, "recompute_share", "at most 1");
  refuse(
      side, [](auto& o) { o.route = "stream"; }, kInvalid, "recompute_share", "with route \"stream\"");
  controls.fail_call(stand_in::kSupportsRebuild, 1, kUnsupported);
  refuse(
      side, [](auto&) {}, kUnsupported, "", "as the test has asked");
  // This cache keeps no hidden states.
  Rebuilding keeps_none(projected);
  tandem_session_release(keeps_none.session);
  tandem_cache_release(keeps_none.cache);
  keeps_none.session = nullptr;
  OK(tandem_cache_create, &keeps_none.cache, keeps_none.engine, keeps_none.model, nullptr);
  refuse(
      keeps_none, [](auto&) {}, kUnsupported, "route", "x_type = 0");
  refuse_step(side);
}

// Appends and single queries over a host of many pieces, of which a share is rebuilt. Every byte is counted, and the CPU
// attends no key.
void check_rebuilt(const Projected& projected, double share, int64_t buffer) {
  const Rebuilding side(projected, share, buffer), twin(projected, 1.0, kBuffer, false);
  int64_t bytes = 0, x_bytes = 0, n_parts = 0, length = 0, seed = 1;
  for (const int64_t n : {200, 1, 1, 30, 130, 600, 1}) {
    attend_twins(projected, side, twin, n, seed++);
    for (int64_t left = n; left > 0; left -= 512) {  // in chunks of 512
      const int64_t outside = outside_of(length);
      const int64_t rebuilt = rebuilt_of(outside, share);
      x_bytes += rebuilt * projected.x_bytes;
      bytes += (outside - rebuilt) * kTokenBytes;
      n_parts += outside > 0 ? 1 : 0;
      length += std::min<int64_t>(left, 512);
    }
  }
  const tandem_session_stats stats = side.stats();
  assert_int_equal(stats.streamed_x_bytes, x_bytes);
  assert_int_equal(stats.streamed_kv_bytes, bytes);
  assert_int_equal(stats.n_stream_parts, n_parts);
  assert_int_equal(stats.n_host_parts, 0);
  controls.set_delay(0);
  assert_true(side.digest() == twin.digest());  // hidden states that came through the device are those of the host
}

// The same from a late device.
void rebuilds_what_is_outside(void**) {
  for (const int32_t rope : {0, TANDEM_ROPE_HALVES, TANDEM_ROPE_INTERLEAVED})
    for (const double share : {1.0, 0.3})
      for (const int64_t buffer : {kBuffer, 5 * kBuffer}) {
        controls.set_delay(buffer == kBuffer ? 50'000 : 0);
        check_rebuilt(Projected(rope, rope == TANDEM_ROPE_HALVES ? TANDEM_NORM_NONE : TANDEM_NORM_LAYER), share, buffer);
      }
}

void rebuilds_from_every_type(void**) {
  for (const int32_t x_type : {TANDEM_F16, TANDEM_Q8_0, TANDEM_Q4_0, TANDEM_Q4_64})
    for (const int32_t norm : {TANDEM_NORM_NONE, TANDEM_NORM_LAYER})
      for (const double share : {1.0, 0.3}) check_rebuilt(Projected(TANDEM_ROPE_HALVES, norm, 71, x_type), share, kBuffer);
}

// When the store's keys differ from those that the hidden states give, the store's keys are not attended.
void attends_what_it_has_made(void**) {
  const Projected projected;
  const Rebuilding side(projected), twin(projected, 1.0, kBuffer, false);
  HiddenCall prompt(projected, 300, 0, 1), next(projected, 2, 300, 2), next_host(projected, 2, 300, 2);
  append_hidden(twin, prompt);
  const int64_t window_begin = 300 - kWindow - 8;
  for (Tensor* wrong : {&prompt.k, &prompt.v})
    for (int64_t i = 0; i < window_begin * kKvHeads * kDim; ++i) wrong->values[static_cast<size_t>(i)] = NAN;
  append_hidden(side, prompt);
  next.to_device();
  attend_hidden(side, next);
  attend_hidden(twin, next_host);
  assert_near(next.output(), next_host.output());
}

// Sequences that were made one after the other with the same number of tokens lie at equal distances in the store. One copy
// sends their hidden states in each extent, in whatever order a call has the sequences.
void sequences_share_copies(void**) {
  constexpr int64_t kSequences = 8, kLength = 250;  // two pages each, as an extent has
  const Projected projected;
  const Rebuilding side(projected, 1.0, 32 * kBuffer), twin(projected, 1.0, kBuffer, false);
  std::vector<int64_t> ids[2];
  const std::vector<int64_t> q_lens(kSequences, 1);
  for (int64_t i = 0; i < kSequences; ++i) {
    const HiddenCall prompt(projected, kLength, 0, 10 + i);
    for (const Side* one : {static_cast<const Side*>(&side), static_cast<const Side*>(&twin)}) {
      OK(tandem_sequence_create, &ids[one == &twin].emplace_back(), one->cache);
      OK(tandem_sequence_append_x, one->cache, ids[one == &twin].back(), kLayer, &prompt.k.view, &prompt.v.view,
         &prompt.x.view, nullptr);
    }
  }
  for (int64_t round = 0; round < 2; ++round) {
    HiddenCall call(projected, kSequences, kLength + round, 7 + round),
        on_host(projected, kSequences, kLength + round, 7 + round);
    call.to_device();
    const int64_t n_copies = counts.n_strided, bytes = counts.strided_bytes;
    for (const bool is_twin : {false, true}) {
      tandem_attend_args args = is_twin ? on_host.args(twin) : call.args(side);
      args.sequences = ids[is_twin].data();
      args.q_lens = q_lens.data();
      args.n_sequences = kSequences;
      OK(tandem_attend, is_twin ? twin.session : side.session, &args);
    }
    assert_near(call.output(), on_host.output());
    if (round > 0) {  // windows are filled
      assert_int_equal(counts.n_strided - n_copies, 1);
      assert_int_equal(counts.strided_bytes - bytes, kSequences * outside_of(kLength) * kXBytes);
    }
    for (std::vector<int64_t>& order : ids) std::reverse(order.begin(), order.begin() + 5);
  }
}

void assert_same_hidden(const Side& side, const Side& twin, int64_t first, int64_t n) {
  Tensor here({n, kHidden}), there({n, kHidden});
  OK(tandem_sequence_read_x, &here.view, side.cache, side.sequence, kLayer, first);
  OK(tandem_sequence_read_x, &there.view, twin.cache, twin.sequence, kLayer, first);
  assert_true(here.values == there.values);
}

// Forks, truncations and removed tokens: hidden states go with their tokens, and keys keep their positions.
void follows_its_sequences(void**) {
  const Projected projected(TANDEM_ROPE_HALVES);
  Rebuilding side(projected, 1.0, 3 * kBuffer), twin(projected, 1.0, kBuffer, false);
  attend_twins(projected, side, twin, 400, 1);
  const int64_t first[] = {side.sequence, twin.sequence};
  OK(tandem_sequence_fork, &side.sequence, side.cache, first[0]);
  OK(tandem_sequence_fork, &twin.sequence, twin.cache, first[1]);
  for (const Side* one : {static_cast<const Side*>(&side), static_cast<const Side*>(&twin)})
    OK(tandem_sequence_truncate, one->cache, one->sequence, 250);
  attend_twins(projected, side, twin, 100, 2);
  side.sequence = first[0];
  twin.sequence = first[1];
  attend_twins(projected, side, twin, 1, 3);
  // A gap: tokens after it keep their positions.
  for (const Side* one : {static_cast<const Side*>(&side), static_cast<const Side*>(&twin)})
    OK(tandem_sequence_remove, one->cache, one->sequence, 70, 45, 0);
  HiddenCall call(projected, 3, side.length() + 45, 4), on_host(projected, 3, twin.length() + 45, 4);
  call.to_device();
  attend_hidden(side, call);
  attend_hidden(twin, on_host);
  assert_near(call.output(), on_host.output());
  assert_same_hidden(side, twin, 65, 10);
}

// Many gaps make many pieces, one between each two gaps. Later tokens are in pieces of the usual length.
void gaps_leave_pieces_long(void**) {
  constexpr int64_t kGaps = 40, kLong = 2600;
  const Projected projected(TANDEM_ROPE_HALVES);
  const Rebuilding side(projected, 1.0, 2 * kBuffer), twin(projected, 1.0, kBuffer, false);  // pieces of three pages
  append_both(side, twin, HiddenCall(projected, kLong, 0, 1));
  for (const Side* one : {static_cast<const Side*>(&side), static_cast<const Side*>(&twin)})
    for (int64_t i = 0; i < kGaps; ++i) OK(tandem_sequence_remove, one->cache, one->sequence, i + 1, 1, 0);
  HiddenCall call(projected, 1, kLong, 2), on_host(projected, 1, kLong, 2);
  call.to_device();
  const int64_t before = counts.n_rebuilt;
  attend_hidden(side, call);
  attend_hidden(twin, on_host);
  assert_near(call.output(), on_host.output());
  assert_in_range(counts.n_rebuilt - before, kGaps + 1, kGaps + kLong / (3 * 128) + 3);
}

// Sessions that rebuild nothing: planned steps, and guesses of which some are kept, bring hidden states to the host too.
void come_with_every_kind_of_call(void**) {
  const Projected projected;
  Rebuilding side(projected), twin(projected, 1.0, kBuffer, false);
  tandem_session_options options = Side::options_of("all");
  options.route = "host";
  change_session(&side, options);
  attend_twins(projected, side, twin, 150, 1);
  void* stream = controls.create_stream();
  const int64_t two = 2;
  HiddenCall planned(projected, two, 150, 2), on_host(projected, two, 150, 2);
  planned.to_device();
  OK(tandem_step_begin, side.session, &side.sequence, &two, 1, stream);
  tandem_attend_args args = planned.args(side);
  args.stream = stream;
  OK(tandem_attend, side.session, &args);
  OK(tandem_step_end, side.session, stream);
  tandem::DeviceError error;
  device->must(device->table->wait(device->self, stream, &error), error);
  attend_hidden(twin, on_host);
  assert_near(planned.output(), on_host.output());
  HiddenCall guess(projected, 5, 152, 3), guess_host(projected, 5, 152, 3);
  guess.to_device();
  for (const Side* one : {static_cast<const Side*>(&side), static_cast<const Side*>(&twin)}) {
    args = (one == &side ? guess : guess_host).args(*one);
    args.flags = TANDEM_ATTEND_SPECULATIVE;
    const int32_t parents[] = {-1, 0, 0, 1, 2};
    args.parent_idx = parents;
    OK(tandem_attend, one->session, &args);
    const int64_t kept[] = {0, 2, 4};
    OK(tandem_session_commit, one->session, one->sequence, kept, 3);
  }
  assert_true(side.digest() == twin.digest());
  assert_int_equal(side.length(), 155);
  assert_true(controls.destroy_stream(stream));
}

// Long appends that are streamed as K and V leave the same sequence.
void come_with_long_appends(void**) {
  const Projected projected(TANDEM_ROPE_HALVES);
  for (const int64_t append_tokens : {0, 700}) {
    Rebuilding side(projected), twin(projected, 1.0, kBuffer, false);
    tandem_session_options options = route_options(0.0);
    options.route = "stream";
    options.append_tokens = append_tokens;
    change_session(&side, options);
    int64_t seed = 1;
    for (const int64_t n : {300, 1100, 1, 1500}) attend_twins(projected, side, twin, n, seed++);
    assert_true(side.digest() == twin.digest());
    assert_same_hidden(side, twin, 290, side.length() - 290);
    assert_int_equal(side.stats().streamed_x_bytes, 0);
    assert_int_equal(side.stats().n_host_parts, 0);
  }
}

// The share is given, and tandem_plan() says what it takes.
void is_planned(void**) {
  for (const double share : {1.0, 0.3}) {
    const Projected projected;
    const Rebuilding side(projected, share);
    const int64_t length = 20'000, outside = outside_of(length - 1), rebuilt = rebuilt_of(outside, share);
    tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
    OK(tandem_plan, &plan, side.session, kLayer, &length, nullptr, 1);
    assert_int_equal(plan.recompute_tokens, rebuilt);
    assert_int_equal(plan.recompute_bytes, rebuilt * kXBytes);
    assert_int_equal(plan.stream_tokens, outside - rebuilt);
    assert_int_equal(plan.stream_bytes, plan.stream_tokens * kTokenBytes);
    assert_int_equal(plan.host_tokens, 0);
    assert_int_equal(plan.resident_tokens, length - outside);
    assert_int_equal(plan.total_ns, std::max({plan.host_ns, plan.bus_ns, plan.device_ns}));
    assert_true(plan.bus_ns > 0 && plan.device_ns > 0 && plan.stream_alone_ns > 0);
    if (share == 1.0) assert_int_equal(plan.total_ns, plan.recompute_alone_ns);
    if (share < 1.0) assert_true(plan.device_ns < plan.recompute_alone_ns);
  }
}

// Several sequences of different lengths share pieces in a call.
void batches(void**) {
  const Projected projected(TANDEM_ROPE_INTERLEAVED);
  const Rebuilding side(projected, 0.8, 4 * kBuffer), twin(projected, 1.0, kBuffer, false);
  constexpr int32_t kSequences = 5;
  const int64_t lengths[kSequences] = {90, 200, 20, 333, 128};
  int64_t ids[2][kSequences], q_lens[kSequences] = {1, 1, 1, 1, 1};
  for (int32_t i = 0; i < kSequences; ++i) {
    const HiddenCall prompt(projected, lengths[i], 0, 10 + i);
    for (const Side* one : {static_cast<const Side*>(&side), static_cast<const Side*>(&twin)}) {
      int64_t& id = ids[one == &side ? 0 : 1][i];
      OK(tandem_sequence_create, &id, one->cache);
      OK(tandem_sequence_append_x, one->cache, id, kLayer, &prompt.k.view, &prompt.v.view, &prompt.x.view, nullptr);
    }
  }
  HiddenCall on_device(projected, kSequences, 0, 99), on_host(projected, kSequences, 0, 99);
  on_device.to_device();
  const int64_t n_rebuilt = counts.n_rebuilt;
  for (HiddenCall* call : {&on_device, &on_host}) {
    const Side& one = call == &on_device ? static_cast<const Side&>(side) : twin;
    tandem_attend_args args = call->args(one);
    args.sequences = ids[call == &on_device ? 0 : 1];
    args.q_lens = q_lens;
    args.n_sequences = kSequences;
    OK(tandem_attend, one.session, &args);
  }
  assert_near(on_device.output(), on_host.output());
  assert_true(counts.n_rebuilt - n_rebuilt <= 3);
}

void check_planned(int32_t x_type) {
  const Projected projected(TANDEM_ROPE_HALVES, TANDEM_NORM_LAYER, 71, x_type);
  for (const double share : {1.0, 0.5})
    for (const auto& [length, appended] : {std::pair<int64_t, int64_t>{200, 1}, {1000, 1}, {1000, 40}, {1400, 700}}) {
      Rebuilding side(projected, share);
      tandem_session_options options = route_options(share);
      options.append_tokens = appended;
      change_session(&side, options);
      const HiddenCall prompt(projected, length - appended, 0, 1);
      append_hidden(side, prompt);
      HiddenCall call(projected, appended, length - appended, 3);
      call.to_device();
      attend_hidden(side, call);
      tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
      tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
      cache.x_type = x_type;
      OK(tandem_plan_memory, &plan, side.engine, side.model, &cache, &options, &length, 1);
      tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
      OK(tandem_cache_get_stats, &stats, side.cache);
      assert_int_equal(plan.x_token_bytes, projected.x_bytes);
      assert_int_equal(stats.host_kv_bytes, plan.host_kv_bytes);
      assert_true(plan.host_kv_bytes >= 2048 * (projected.x_bytes + kTokenBytes));
      assert_held(side, plan);
      assert_true(plan.device_weights_bytes > 2 * 2 * kHidden * kKvHeads * kDim);
    }
}

void takes_what_is_planned(void**) {
  for (const int32_t x_type : {TANDEM_BF16, TANDEM_Q4_64}) check_planned(x_type);
}

// Every call of the device fails in turn while a call starts. The call reports the failure, no sequence grows, and the next
// try succeeds.
void survives_failing_calls(void**) {
  using namespace stand_in;
  const Projected projected;
  const HiddenCall prompt(projected, 600, 0, 1);
  HiddenCall call(projected, 3, 600, 2), on_host(projected, 3, 600, 2);
  call.to_device();
  {  // the same calls each time
    const Rebuilding twin(projected, 1.0, kBuffer, false);
    append_hidden(twin, prompt);
    attend_hidden(twin, on_host);
  }
  for (const stand_in::Call failing : {kAllocate, kCopy, kWait, kAppend, kAttend, kMerge, kAccumulate, kCreateStream,
                                       kRecordEvent, kWaitEvent, kCopyStrided, kRebuild}) {
    int n_failed = 0;
    for (int64_t nth = 1;; nth += tandem::test::one_in()) {
      const Rebuilding side(projected, 0.5);
      append_hidden(side, prompt);
      call.forget_output();
      const int32_t status = attend_failing(side, call.args(side), failing, nth);
      if (status != TANDEM_OK) {
        ++n_failed;
        assert_int_equal(status, TANDEM_ERROR_BACKEND);
        assert_int_equal(side.length(), 600);
        attend_hidden(side, call);
      }
      assert_near(call.output(), on_host.output());
      if (status == TANDEM_OK) break;
    }
    if (n_failed == 0) fail_msg("call %d was never made to fail", failing);
  }
}

// Pages in flight keep their contents, whatever other calls do meanwhile.
void holds_its_pages(void**) {
  const Projected projected;
  const Rebuilding side(projected), twin(projected, 1.0, kBuffer, false);
  attend_twins(projected, side, twin, 600, 1);
  HiddenCall late(projected, 2, 600, 2), on_host(projected, 2, 600, 2);
  late.to_device();
  controls.set_delay(3'000'000);
  attend_hidden(side, late);
  OK(tandem_sequence_truncate, side.cache, side.sequence, 0);
  append_hidden(side, HiddenCall(projected, 600, 0, 50));
  controls.set_delay(0);
  attend_hidden(twin, on_host);
  assert_near(late.output(), on_host.output());
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(refuses, forget),
      cmocka_unit_test_teardown(rebuilds_what_is_outside, forget),
      cmocka_unit_test_teardown(rebuilds_from_every_type, forget),
      cmocka_unit_test_teardown(attends_what_it_has_made, forget),
      cmocka_unit_test_teardown(sequences_share_copies, forget),
      cmocka_unit_test_teardown(follows_its_sequences, forget),
      cmocka_unit_test_teardown(gaps_leave_pieces_long, forget),
      cmocka_unit_test_teardown(come_with_every_kind_of_call, forget),
      cmocka_unit_test_teardown(come_with_long_appends, forget),
      cmocka_unit_test_teardown(is_planned, forget),
      cmocka_unit_test_teardown(batches, forget),
      cmocka_unit_test_teardown(takes_what_is_planned, forget),
      cmocka_unit_test_teardown(survives_failing_calls, forget),
      cmocka_unit_test_teardown(holds_its_pages, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
