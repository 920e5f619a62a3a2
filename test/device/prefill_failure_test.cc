// SPDX-License-Identifier: MIT
// A prompt in chunks, each a step as runtimes make them, by every route that brings keys to the device. An argument is
// missing, the host's store is full, or a copy over the bus fails during a chunk. The error has its status and field, the
// sequence is as at the begin of the step, and the same chunk can be attended again.
#include <cstring>

#include "device/hidden_side.h"
#include "one_in.h"

using namespace tandem_test;

namespace {

constexpr int64_t kChunks[] = {300, 200, 700};  // the last one is a long append
constexpr const char* kRoutes[] = {"stream", "host+stream", "recompute"};

tandem_session_options options_of_route(const char* route) {
  tandem_session_options options = Side::options_of("all");
  options.route = route;
  options.stream_buffer_bytes = kBuffer;
  if (std::strcmp(route, "host+stream") == 0) options.stream_fraction = 0.5;
  return options;
}

struct Prefilling : Rebuilding {
  Prefilling(const Projected& projected, const char* route, int64_t host_cap = 0)
      : Rebuilding(projected, options_of_route(route), true, host_cap) {}
};

// One step and its first error. After an error the step is rolled back.
struct Outcome {
  int32_t status = TANDEM_OK;
  std::string field;
};
Outcome run_step(const Side& side, const tandem_attend_args& args, int64_t n) {
  tandem_error* error = nullptr;
  Outcome outcome;
  outcome.status = tandem_step_begin(side.session, &side.sequence, &n, 1, nullptr, &error);
  if (outcome.status == TANDEM_OK) {
    outcome.status = tandem_attend(side.session, &args, &error);
    const int32_t ended = tandem_step_end(side.session, nullptr, nullptr);
    assert_int_equal(ended, outcome.status == TANDEM_OK ? TANDEM_OK : TANDEM_ERROR_INVALID_STATE);
  }
  if (error != nullptr) outcome.field = tandem_error_field(error);
  tandem_error_release(error);
  return outcome;
}

// Attends the chunks before the last one on both sides.
void prefill(const Projected& projected, const Side& side, const Side& twin) {
  for (int64_t chunk = 0; chunk < 2; ++chunk) attend_twins(projected, side, twin, kChunks[chunk], 1 + chunk);
}

void attend_again(const Prefilling& side, const Side& twin, const HiddenCall& call, const HiddenCall& on_host) {
  assert_int_equal(run_step(side, call.args(side), call.n).status, TANDEM_OK);
  attend_hidden(twin, on_host);
  assert_near(call.output(), on_host.output());
  assert_true(side.digest() == twin.digest());
}

// Both sides after the first chunks, ready for the last one.
struct LastChunk {
  const Prefilling side;
  const Rebuilding twin;
  HiddenCall call, on_host;
  uint64_t before;

  LastChunk(const Projected& projected, const char* route)
      : side(projected, route),
        twin(projected, 1.0, kBuffer, false),
        call(projected, kChunks[2], 500, 3),
        on_host(projected, kChunks[2], 500, 3) {
    prefill(projected, side, twin);
    before = side.digest();
    call.to_device();
  }
  // Asserts that the failed chunk left nothing, and attends it again.
  void come_again() const {
    assert_int_equal(side.length(), 500);
    assert_true(side.digest() == before);
    attend_again(side, twin, call, on_host);
  }
};

void hidden_states_are_missing(void**) {
  const Projected projected;
  for (const char* route : kRoutes) {
    const LastChunk last(projected, route);
    tandem_attend_args args = last.call.args(last.side);
    args.x = nullptr;
    const Outcome outcome = run_step(last.side, args, last.call.n);
    assert_int_equal(outcome.status, TANDEM_ERROR_INVALID_ARGUMENT);
    assert_string_equal(outcome.field.c_str(), "x");
    last.come_again();
  }
}

// The cap has room for the first chunks and one more page of the store, not for the last chunk.
void the_host_store_is_full(void**) {
  const Projected projected;
  for (const char* route : kRoutes) {
    tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
    const Rebuilding twin(projected, 1.0, kBuffer, false);
    {
      const Prefilling first(projected, route);
      attend_twins(projected, first, twin, 500, 1);
      OK(tandem_cache_get_stats, &stats, first.cache);
      OK(tandem_sequence_truncate, twin.cache, twin.sequence, 0);
    }
    const Prefilling side(projected, route, stats.host_kv_bytes);
    prefill(projected, side, twin);
    const uint64_t before = side.digest();
    HiddenCall call(projected, 3000, 500, 3);
    call.to_device();
    const Outcome outcome = run_step(side, call.args(side), call.n);
    assert_int_equal(outcome.status, TANDEM_ERROR_CAPACITY);
    assert_string_equal(outcome.field.c_str(), "host_cap_bytes");
    assert_int_equal(side.length(), 500);
    assert_true(side.digest() == before);
    HiddenCall next(projected, 1, 500, 4), on_host(projected, 1, 500, 4);
    next.to_device();
    attend_again(side, twin, next, on_host);
  }
}

// The chunks in device memory, which several sides attend in turn, and the outputs of a twin without a device.
struct Prompt {
  std::vector<std::unique_ptr<HiddenCall>> calls;
  std::vector<std::vector<float>> outputs;
  uint64_t digest = 0;  // after the last chunk

  explicit Prompt(const Projected& projected) {
    const Rebuilding twin(projected, 1.0, kBuffer, false);
    for (const int64_t n : kChunks) {
      const auto seed = static_cast<int64_t>(calls.size()) + 1;
      const HiddenCall on_host(projected, n, twin.length(), seed);
      calls.push_back(std::make_unique<HiddenCall>(projected, n, twin.length(), seed));
      calls.back()->to_device();
      attend_hidden(twin, on_host);
      outputs.push_back(on_host.output());
    }
    digest = twin.digest();
  }
  Outcome attend(const Side& side, size_t chunk) const {
    const HiddenCall& call = *calls[chunk];
    call.forget_output();
    const Outcome outcome = run_step(side, call.args(side), call.n);
    if (outcome.status == TANDEM_OK) assert_near(call.output(), outputs[chunk]);
    return outcome;
  }
};

// Each copy and each product of the last chunk fails in turn.
void the_bus_fails(void**) {
  using namespace stand_in;
  const Projected projected(TANDEM_ROPE_HALVES);
  const Prompt prompt(projected);
  for (const char* route : kRoutes)
    for (const stand_in::Call failing : {kCopyStrided, kRecordEvent, kWaitEvent, kRebuild}) {
      int n_failed = 0;
      for (int64_t nth = 1;; nth += (nth < 4 ? 1 : 7) * tandem::test::one_in()) {
        const Prefilling side(projected, route);
        for (size_t chunk = 0; chunk < 2; ++chunk) assert_int_equal(prompt.attend(side, chunk).status, TANDEM_OK);
        const uint64_t before = side.digest();
        controls.fail_call(failing, nth, TANDEM_ERROR_BACKEND);
        const Outcome outcome = prompt.attend(side, 2);
        controls.fail_call(failing, INT64_MAX, TANDEM_OK);
        if (outcome.status == TANDEM_OK) break;
        ++n_failed;
        assert_int_equal(outcome.status, TANDEM_ERROR_BACKEND);
        assert_int_equal(side.length(), 500);
        assert_true(side.digest() == before);
        assert_int_equal(prompt.attend(side, 2).status, TANDEM_OK);
        assert_true(side.digest() == prompt.digest);
      }
      const bool may_fail = failing != kRebuild || std::strcmp(route, "recompute") == 0;
      if ((n_failed > 0) != may_fail) fail_msg("%s: call %d failed %d times", route, failing, n_failed);
    }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(hidden_states_are_missing, forget),
      cmocka_unit_test_teardown(the_host_store_is_full, forget),
      cmocka_unit_test_teardown(the_bus_fails, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
