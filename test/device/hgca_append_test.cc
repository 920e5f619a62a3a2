// SPDX-License-Identifier: MIT
// Long appends under "hgca", on the stand-in. Keys are streamed to all queries, as under "all". The selection after an
// append is that of a session without a device, where the host sees every query.
#include <array>

#include "device/device_side.h"

using namespace tandem_test;

namespace {

constexpr int64_t kBuffer = 64 * kDim * 2 * 2 * 3 / 2;  // one and a half times 64 tokens of one KV head
constexpr int32_t kLayers = 2;

tandem_session_options options_of(const char* route, int64_t append_tokens) {
  tandem_session_options options = Side::options_of("hgca");
  options.route = route;
  options.stream_buffer_bytes = kBuffer;
  options.append_tokens = append_tokens;
  return options;
}

// The tokens that a KV head has selected, and the MAW of each in the first query head of its group.
struct Selection {
  std::vector<int64_t> tokens;
  std::vector<float> maw;

  Selection(const Side& side, int32_t layer, int32_t kv_head) {
    int64_t n = 0;
    const auto most = static_cast<size_t>(side.length(layer));
    tokens.resize(most);
    maw.resize(most);
    OK(tandem_session_selection, tokens.data(), maw.data(), side.length(layer), &n, side.session, side.sequence, layer,
       kv_head, 0);
    tokens.resize(static_cast<size_t>(n));
    maw.resize(static_cast<size_t>(n));
  }
};

void assert_same_selection(const Side& side, const Side& twin) {
  size_t n = 0;
  for (int32_t layer = 0; layer < kLayers; ++layer)
    for (int32_t h = 0; h < kKvHeads; ++h) {
      const Selection got(side, layer, h), wanted(twin, layer, h);
      assert_true(got.tokens == wanted.tokens);
      for (size_t i = 0; i < wanted.maw.size(); ++i)
        if (!(std::fabs(got.maw[i] - wanted.maw[i]) <= 1e-3f * wanted.maw[i] + 1e-9f))
          fail_msg("token %lld has %g, not %g", static_cast<long long>(wanted.tokens[i]), got.maw[i], wanted.maw[i]);
      n += wanted.tokens.size();
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

// Chunks and tickets, appends shorter than the number of queries that count, and decode calls. The selection is not asked
// for in between, so the decode call makes it.
void selects_as_on_the_host(void**) {
  for (const int64_t append_tokens : {0, 600, 100})
    for (const bool looks : {false, true}) {
      Side side(true, "hgca", 0, kLayers);
      change_session(&side, options_of("stream", append_tokens));
      const Side twin(false, "hgca", 0, kLayers);
      int64_t seed = 1;
      for (const int64_t n : {700, 1, 1300, 1, 1, 20, 1, 20, 600, 3, 1, 80, 90, 1, 300, 2, 1}) {
        attend_both(side, twin, n, seed);
        if (looks) assert_same_selection(side, twin);
        seed += 10;
      }
      assert_same_selection(side, twin);
      assert_true(side.stats().streamed_kv_bytes > 0);
    }
}

// A chunk goes at once, together with the queries that count.
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
  assert_int_equal(side.stats().streamed_kv_bytes - before, outside_of(1000) * token_bytes);
}

// The last chunk of an append may be a single query. Its keys are streamed like those of the queries before it.
void streams_to_the_last_query(void**) {
  Side side(true, "hgca", 0, kLayers);
  change_session(&side, options_of("stream", 100));
  const Side twin(false, "hgca", 0, kLayers);
  attend_both(side, twin, 700, 1);
  const int64_t before = side.stats().host_part_tokens;
  attend_both(side, twin, 201, 10);
  assert_int_equal(side.stats().host_part_tokens, before);
  attend_both(side, twin, 1, 20);
  assert_same_selection(side, twin);
}

// lse is right, also with room between rows, and when the library needs it as well.
void gives_lse(void**) {
  constexpr int64_t n = 900;
  for (const int64_t stride : {int64_t{kQHeads}, int64_t{kQHeads} + 3}) {
    Side side(true, "hgca", 0, 1);
    change_session(&side, options_of("stream", 0));
    const Side twin(false, "hgca", 0, 1);
    for (int64_t round = 0; round < 2; ++round) {  // with and without keys outside the window
      Call on_device(n, 1 + round), on_host(n, 1 + round);
      on_device.to_device();
      std::vector<float> lse(n * stride, 7.0f), wanted(n * stride, 7.0f);
      const auto bytes = static_cast<int64_t>(lse.size() * sizeof(float));
      auto* const there = static_cast<float*>(device->allocate(bytes));
      device->upload(there, lse.data(), bytes);
      for (const Side* one : {static_cast<const Side*>(&side), &twin}) {
        const int64_t shape[] = {n, kQHeads};
        tandem_tensor view;
        OK(tandem_tensor_init, &view, TANDEM_F32, one == &twin ? wanted.data() : there, 2, shape);
        view.device_type = one == &twin ? TANDEM_DEVICE_HOST : TANDEM_DEVICE_CUDA;
        view.stride[0] = stride;
        tandem_attend_args args = (one == &twin ? on_host : on_device).args(*one);
        args.lse = &view;
        OK(tandem_attend, one->session, &args);
      }
      device->wait();
      device->download(lse.data(), there, bytes);
      device->release(there);
      assert_close(lse, wanted);
    }
  }
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
      cmocka_unit_test_teardown(streams_to_the_last_query, forget),
      cmocka_unit_test_teardown(gives_lse, forget),
      cmocka_unit_test_teardown(refuses_what_it_cannot, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
