// SPDX-License-Identifier: MIT
// Queries of tokens that are already in the cache (k and v NULL), as many as there can be, on the stand-in. They see the
// keys that existed when their tokens came. The window has only the newest of these. Later calls are as if these queries had
// not been made.
#include "device/device_side.h"

using namespace tandem_test;

namespace {

constexpr uint8_t kFirstStreams[] = {1, 0}, kAllStream[] = {1, 1};

struct Case {
  const char* policy;
  const uint8_t* streaming_heads;  // null: no head streams
  int64_t window, length, n;       // the last n of `length` tokens are read
  bool is_of_host = false;         // the host appended the tokens, and a guess has brought rows, but no MAW, into the window
};

// Gives the side a session with few sinks.
void begin(Side* side, const Case& c) {
  tandem_session_options options = Side::options_of(c.policy);
  options.window_tokens = c.window;
  options.sink_tokens = 4;
  options.streaming_heads = c.streaming_heads;
  options.n_streaming_heads = c.streaming_heads != nullptr ? kKvHeads : 0;
  change_session(side, options);
}

void read(const Side& side, const Call& call) {
  tandem_attend_args args = call.args(side);
  args.k = args.v = nullptr;
  OK(tandem_attend, side.session, &args);
}

// Makes a guess of which no token is kept.
void guess(const Side& side, bool on_device) {
  Call call(3, 2);
  if (on_device) call.to_device();
  tandem_attend_args args = call.args(side);
  args.flags = TANDEM_ATTEND_SPECULATIVE;
  OK(tandem_attend, side.session, &args);
  OK(tandem_session_commit, side.session, side.sequence, nullptr, 0);
}

void expect_same(const Case& c, const char* what, const Call& call, const Call& on_host) {
  const std::vector<float> got = call.output(), wanted = on_host.output();
  for (size_t i = 0; i < got.size(); ++i)
    if (!(std::fabs(got[i] - wanted[i]) <= 1e-5f))
      fail_msg("%s, %d streaming heads, window %lld: %s, %lld of %lld tokens: element %zu is %g, not %g", c.policy,
               c.streaming_heads == nullptr ? 0 : 1 + c.streaming_heads[1], static_cast<long long>(c.window), what,
               static_cast<long long>(c.n), static_cast<long long>(c.length), i, got[i], wanted[i]);
}

void read_as_twin(const Case& c) {
  Side side(true, c.policy), twin(false, c.policy);
  begin(&side, c);
  begin(&twin, c);
  for (const Side* one : {&side, &twin}) {
    Call call(c.length, 1);
    if (one == &side && !c.is_of_host) call.to_device();
    attend(*one, call);
    OK(tandem_engine_drain, one->engine, -1);
  }
  if (c.is_of_host) guess(side, true), guess(twin, false);
  for (int64_t seed = 10; seed < 20;) {
    Call call(c.n, ++seed), on_host(c.n, seed);
    call.to_device();
    read(side, call);
    read(twin, on_host);
    expect_same(c, "read", call, on_host);
    for (const int64_t n : {1, 1, 40, 1}) {  // these calls judge the keys that were in the window
      Call next(n, ++seed), next_on_host(n, seed);
      next.to_device();
      attend(side, next);
      attend(twin, next_on_host);
      expect_same(c, "then", next, next_on_host);
    }
  }
  assert_int_equal(side.stats().selected_keys, twin.stats().selected_keys);
  assert_true(side.digest() == twin.digest());
}

// Reads in one part and in several. The first parts end before the window begins, so the rows that they bring into its ring
// are older than the rows there.
void reads_are_those_of_the_host(void**) {
  for (const char* policy : {"all", "streaming", "hgca"})
    for (const int64_t window : {0, 16, 300})
      for (const int64_t n : {2, 513, 600, 900})
        for (const bool is_of_host : {false, true}) read_as_twin({policy, nullptr, window, 1150, n, is_of_host});
}

// With streaming heads the first keys of the queries may be older than the window's.
void reads_by_streaming_heads_too(void**) {
  for (const uint8_t* heads : {kFirstStreams, kAllStream})
    for (const int64_t window : {0, 16, 300})
      for (const int64_t n : {2, 900}) read_as_twin({"all", heads, window, 1150, n});
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(reads_are_those_of_the_host, forget),
      cmocka_unit_test_teardown(reads_by_streaming_heads_too, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
