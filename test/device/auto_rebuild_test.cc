// SPDX-License-Identifier: MIT
// Route "auto" when a cache keeps hidden states. The planner rebuilds keys as far as that takes less time than sending K and
// V, and does without where it cannot. The tests set the machine's rates, because the stand-in rebuilds keys slowly.
#include "device/hidden_side.h"
#include "lib/abi/api_session.h"
#include "lib/store/cache.h"

using namespace tandem_test;

namespace {

constexpr int64_t kLong = 12'000;  // more than 4 MiB of keys, enough to be worth planning
constexpr int64_t kLongBuffer = int64_t{1} << 20;

// Nanoseconds per key.
struct Rates {
  double host, stream, rebuild;
};

tandem_session_options auto_options(int64_t append_tokens = 0) {
  tandem_session_options options = Side::options_of("all");
  options.stream_buffer_bytes = kLongBuffer;
  options.append_tokens = append_tokens;
  return options;
}

// Gives the side a new session, and its engine these rates.
void let_plan(Side* side, const Rates& rates, int64_t append_tokens = 0) {
  std::shared_ptr<tandem::Engine> engine_object;
  std::shared_ptr<tandem::Cache> cache_object;
  assert_true(tandem::resolve(side->engine, "engine", &engine_object).ok());
  assert_true(tandem::resolve(side->cache, "cache", &cache_object).ok());
  tandem::Profile& profile = engine_object->profile();
  const tandem::Layer& layer = cache_object->layers()[0];
  profile.note_bus_trial(static_cast<double>(kTokenBytes) / rates.stream);
  for (int64_t n = 1; n <= 512; n *= 2) profile.note_trial(layer, n, 1000, 1000 * rates.host / 0.8);
  if (layer.x_type != 0) profile.note_rebuild_trial(layer, rates.rebuild);
  change_session(side, auto_options(append_tokens));
}

struct Auto : Rebuilding {
  Auto(const Projected& projected, const Rates& rates, int64_t append_tokens = 0)
      : Rebuilding(projected, auto_options(append_tokens)) {
    let_plan(this, rates, append_tokens);
  }
};

// Hidden states are a quarter of the bytes of K and V. If the device keeps up, it rebuilds all keys. If a rebuild takes half
// as long as K and V on the bus, four fifths are rebuilt and the rest is streamed. If a rebuild takes longer than the bus,
// or the CPU is faster than both, no key is rebuilt.
void makes_what_takes_less(void**) {
  const Projected projected(TANDEM_ROPE_HALVES);
  const Rebuilding twin(projected, 1.0, kBuffer, false);
  struct Wanted {
    Rates rates;
    double least, most;  // least and largest share of the outside keys that are rebuilt
    bool on_host;
    int64_t n_planned;  // parts whose time is compared with the plan; 0 where the call waits for the device
  };
  const Wanted all[] = {{{100'000, 1000, 1}, 1.0, 1.0, false, 1},
                        {{100'000, 1000, 500}, 0.75, 0.85, false, 0},
                        {{100'000, 1000, 90'000}, 0.0, 0.0, false, 1},
                        {{0.1, 1000, 1}, 0.0, 0.0, true, 1}};
  for (const Wanted& wanted : all) {
    const Auto side(projected, wanted.rates);
    OK(tandem_sequence_truncate, twin.cache, twin.sequence, 0);
    append_both(side, twin, HiddenCall(projected, kLong, 0, 1));
    const int64_t outside = outside_of(kLong), length = kLong + 3, three = 3;
    tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
    OK(tandem_plan, &plan, side.session, kLayer, &length, &three, 1);
    assert_int_equal(plan.recompute_tokens + plan.stream_tokens + plan.host_tokens, outside);
    assert_true((plan.host_tokens == outside) == wanted.on_host);
    const double share = static_cast<double>(plan.recompute_tokens) / static_cast<double>(outside);
    if (!(share >= wanted.least && share <= wanted.most)) fail_msg("%g of the keys are made", share);
    assert_true(plan.total_ns <= std::min({plan.host_alone_ns, plan.stream_alone_ns, plan.recompute_alone_ns}));
    attend_twins(projected, side, twin, 3, 5);
    const tandem_session_stats stats = side.stats();
    assert_int_equal(stats.streamed_x_bytes, plan.recompute_bytes);
    assert_int_equal(stats.streamed_kv_bytes, plan.stream_bytes);
    assert_int_equal(stats.n_host_parts, wanted.on_host ? 1 : 0);
    assert_int_equal(stats.n_planned_parts, wanted.n_planned);
  }
}

constexpr Rates kRebuilds = {100'000, 1000, 1};

tandem_memory_plan plan_of(const Side& side, bool keeps_x, int64_t append_tokens, int64_t length, int64_t cap,
                           int32_t wanted = TANDEM_OK) {
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const tandem_session_options options = auto_options(append_tokens);
  tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  if (keeps_x) cache.x_type = TANDEM_BF16;
  cache.device_cap_bytes = cap;
  tandem_error* error = nullptr;
  assert_int_equal(tandem_plan_memory(&plan, side.engine, side.model, &cache, &options, &length, 1, &error), wanted);
  if (wanted != TANDEM_OK) assert_string_equal(tandem_error_field(error), "device_cap_bytes");
  tandem_error_release(error);
  return plan;
}

// The plan has the device memory that the route takes: for few queries, for appends of one ticket and for long appends, with
// hidden states. (A single query that fills its window takes no route.)
void takes_what_is_planned(void**) {
  const Projected projected;
  for (const int64_t appended : {2, 40, 1024, 2048}) {
    const Auto side(projected, kRebuilds, appended);
    const Rebuilding twin(projected, 1.0, kBuffer, false);
    append_both(side, twin, HiddenCall(projected, kLong, 0, 1));
    attend_twins(projected, side, twin, appended, 5);
    const tandem_memory_plan plan = plan_of(side, true, appended, kLong + appended, 0);
    assert_never_more(side, plan);
    assert_true(plan.device_weights_bytes > 0);
  }
}

// The same for caches without hidden states: only keys cross the bus, or nothing is worth sending, and no more memory than
// planned is taken. A cap of exactly the plan is enough. A cap of one byte less is refused by the plan, and a session does
// without the largest part.
void holds_to_its_cap(void**) {
  for (const int64_t before : {kLong, kPrompt})
    for (const int64_t appended : {2, 40, 1024, 2048}) {
      tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
      // no cap at first, then exactly the plan, then one byte less
      for (const int64_t more : {INT64_C(0), INT64_C(0), INT64_C(-1)}) {
        const int64_t cap = plan.device_window_bytes == 0 ? 0 : planned_bytes(plan) + more;
        Side side(true, "all", cap);
        const Side twin(false);
        let_plan(&side, kRebuilds, appended);
        const tandem_memory_plan planned =
            plan_of(side, false, appended, before + appended, cap, more == 0 ? TANDEM_OK : TANDEM_ERROR_CAPACITY);
        const Tensor k({before, kKvHeads, kDim}, 1), v({before, kKvHeads, kDim}, 2);
        for (const Side* one : {static_cast<const Side*>(&side), &twin})
          OK(tandem_sequence_append, one->cache, one->sequence, kLayer, &k.view, &v.view, nullptr);
        if (before == kPrompt && more < 0) break;  // nothing is left that it could do without
        tandem_test::attend_twins(side, twin, appended, 5);
        assert_true((planned.device_stream_bytes > 0) == (before == kLong));
        if (more == 0) {
          assert_never_more(side, planned);
          assert_int_equal(side.stats().n_stream_parts, before == kLong);
        }
        assert_true(cap == 0 || planned_bytes(planned) == planned_bytes(plan));
        plan = planned;
      }
    }
}

// When memory is missing, the keys stay with the bus or the CPU, or the call reports the lack and has no effect.
void goes_without_memory(void**) {
  const Projected projected;
  int n_without = 0;
  for (int64_t nth = 1;; ++nth) {
    const Auto side(projected, {100'000, 1000, 1});
    const Rebuilding twin(projected, 1.0, kBuffer, false);
    append_both(side, twin, HiddenCall(projected, kLong, 0, 1));
    HiddenCall call(projected, 2, kLong, 5), on_host(projected, 2, kLong, 5);
    call.to_device();
    const int32_t status = attend_failing(side, call.args(side), stand_in::kAllocate, nth, 0, TANDEM_ERROR_OUT_OF_MEMORY);
    if (status != TANDEM_OK) {
      assert_int_equal(status, TANDEM_ERROR_OUT_OF_MEMORY);
      assert_int_equal(side.length(), kLong);
      attend_hidden(side, call);
    }
    attend_hidden(twin, on_host);
    assert_near(call.output(), on_host.output());
    const bool is_rebuilt = side.stats().streamed_x_bytes > 0;
    if (status == TANDEM_OK && is_rebuilt) break;
    n_without += status == TANDEM_OK;
  }
  assert_true(n_without > 0);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(makes_what_takes_less, forget),
      cmocka_unit_test_teardown(takes_what_is_planned, forget),
      cmocka_unit_test_teardown(holds_to_its_cap, forget),
      cmocka_unit_test_teardown(goes_without_memory, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
