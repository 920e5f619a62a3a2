// SPDX-License-Identifier: MIT
// Long appends under "hgca", on the stand-in: keys are streamed to all queries as under "all", and what is selected after
// them is what a session without a device selects, whose every query the host sees.
#include <array>

#include "device/device_side.h"

using namespace tandem_test;

namespace {

constexpr int64_t kBuffer = 64 * kDim * 2 * 2 * 3 / 2;  // 64 tokens of one KV head, and some
constexpr int32_t kLayers = 2;

tandem_session_options options_of(const char* route, int64_t append_tokens) {
  tandem_session_options options = Side::options_of("hgca");
  options.route = route;
  options.stream_buffer_bytes = kBuffer;
  options.append_tokens = append_tokens;
  return options;
}

std::vector<int64_t> selection(const Side& side, int32_t layer, int32_t kv_head) {
  int64_t n = 0;
  std::vector<int64_t> tokens(static_cast<size_t>(side.length(layer)));
  OK(tandem_session_selection, tokens.data(), nullptr, static_cast<int64_t>(tokens.size()), &n, side.session, side.sequence,
     layer, kv_head, 0);
  tokens.resize(static_cast<size_t>(n));
  return tokens;
}

void assert_same_selection(const Side& side, const Side& twin) {
  size_t n = 0;
  for (int32_t layer = 0; layer < kLayers; ++layer)
    for (int32_t h = 0; h < kKvHeads; ++h) {
      const std::vector<int64_t> got = selection(side, layer, h), wanted = selection(twin, layer, h);
      assert_true(got == wanted);
      n += wanted.size();
    }
  assert_true(n > 0);
}

void attend_both(const Side& side, const Side& twin, int64_t n, int64_t seed) {
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    Call on_device(n, seed + layer), on_host(n, seed + layer);
    on_device.to_device();
    attend(side, on_device, layer);
    attend(twin, on_host, layer);
    assert_close(on_device.output(), on_host.output());
  }
}

// Chunks and tickets, appends that are shorter than the queries that count, decodes, and a selection that nobody asks for in
// between, so that the decode has it made.
void selects_as_on_the_host(void**) {
  for (const int64_t append_tokens : {0, 600, 100})
    for (const bool looks : {false, true}) {
      Side side(true, "hgca", 0, kLayers);
      change_session(&side, options_of("stream", append_tokens));
      const Side twin(false, "hgca", 0, kLayers);
      int64_t seed = 1;
      for (const int64_t n : {700, 1, 1300, 1, 1, 20, 1, 20, 600, 3, 1, 80, 90, 1}) {
        attend_both(side, twin, n, seed);
        if (looks) assert_same_selection(side, twin);
        seed += 10;
      }
      assert_same_selection(side, twin);
      assert_true(side.stats().streamed_kv_bytes > 0);
    }
}

// A chunk goes at once, but for the queries that count.
void streams_keys_once_for_a_chunk(void**) {
  Side side(true, "hgca", 0, 1);
  change_session(&side, options_of("stream", 0));
  Call first(1000, 1), second(3000, 2);
  first.to_device();
  attend(side, first);
  first.output();
  const int64_t before = side.stats().streamed_kv_bytes;
  second.to_device();
  attend(side, second);
  second.output();
  const int64_t token_bytes = int64_t{kKvHeads} * kDim * 2 * 2;
  const int64_t chunk = outside_of(1000) * token_bytes, tail = outside_of(4000 - 64) * token_bytes;
  assert_int_equal(side.stats().streamed_kv_bytes - before, chunk + tail);
}

void refuses_what_it_cannot(void**) {
  const Side side(true, "hgca");
  refuse_session(side, options_of("recompute", 0), TANDEM_ERROR_UNSUPPORTED, "route", "attend all of them");
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(selects_as_on_the_host, forget),
      cmocka_unit_test_teardown(streams_keys_once_for_a_chunk, forget),
      cmocka_unit_test_teardown(refuses_what_it_cannot, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
