// SPDX-License-Identifier: MIT
// Stores that are pinned in the background, and windows that are filled meanwhile. Here pieces are small, so that a store
// has many, and the buffers for filling windows are small, too.
#include <chrono>
#include <thread>

#include "device/device_side.h"
#include "lib/abi/api_session.h"
#include "lib/machine/device_memory.h"
#include "lib/pieces/window_staging.h"
#include "lib/store/cache.h"

using namespace tandem_test;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPiece = 64 << 10, kLong = 12'000;      // bytes, tokens
constexpr int64_t kTokenBytes = kKvHeads * kDim * 2 * 2;  // of a layer
constexpr int32_t kDeep = 3;

int64_t pinned_bytes(const Side& side) {
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, side.cache);
  return stats.pinned_bytes;
}

tandem_session_options options_of(const char* route, int64_t window = kWindow) {
  tandem_session_options options = Side::options_of("all");
  options.route = route;
  options.window_tokens = window;
  options.stream_buffer_bytes = 1 << 20;
  return options;
}

void append_on_host(const Side& side, int64_t n, int64_t seed) {
  for (int32_t l = 0; l < kDeep; ++l) {
    const Tensor k({n, kKvHeads, kDim}, seed + l), v({n, kKvHeads, kDim}, seed + l + kDeep);
    OK(tandem_sequence_append, side.cache, side.sequence, l, &k.view, &v.view, nullptr);
  }
}

// A device and its twin without one, with a long sequence in the host's store. The engine's rates say that the bus is by far
// the faster way to attend it.
struct Sides {
  Side side, twin;

  explicit Sides(const char* route, double host_key_ns = 1e5) : side(true, "all", 0, kDeep), twin(false, "all", 0, kDeep) {
    std::shared_ptr<tandem::Engine> engine;
    std::shared_ptr<tandem::Cache> cache;
    assert_true(tandem::resolve(side.engine, "engine", &engine).ok());
    assert_true(tandem::resolve(side.cache, "cache", &cache).ok());
    engine->profile().note_bus_trial(100.0);
    for (int64_t n = 1; n <= 512; n *= 2) engine->profile().note_trial(cache->layers()[0], n, 1000, 1000 * host_key_ns);
    change_session(&side, options_of(route));
    append_on_host(side, kLong, 1);
    append_on_host(twin, kLong, 1);
  }
  // Attends n tokens in all layers. Returns how many seconds the longest call took.
  double attend_all(int64_t n, int64_t seed) const {
    double longest = 0.0;
    for (int32_t l = 0; l < kDeep; ++l) {
      tandem_test::Call call(n, seed + l), on_host(n, seed + l);
      call.to_device();
      const auto begin = Clock::now();
      attend(side, call, l);
      longest = std::max(longest, std::chrono::duration<double>(Clock::now() - begin).count());
      attend(twin, on_host, l);
      assert_close(call.output(), on_host.output());
    }
    return longest;
  }
};

// Pinning a piece takes half a second. Calls go on meanwhile and stream once the piece is pinned. The first token only fills
// the window.
void calls_do_not_wait(void**) {
  constexpr double kPinSeconds = 0.5;
  const Sides sides("auto", 1e3);  // 20 ms for the CPU, less than pinning takes
  const auto begin = Clock::now();
  controls.set_pin_delay(static_cast<int64_t>(kPinSeconds * 1e9));
  sides.attend_all(1, 10);
  assert_true(sides.side.stats().filled_kv_bytes > 0);
  assert_int_equal(sides.side.stats().n_stream_parts, 0);
  const double longest = sides.attend_all(1, 20);
  assert_true(longest < kPinSeconds / 2 || std::chrono::duration<double>(Clock::now() - begin).count() > kPinSeconds);
  controls.set_pin_delay(0);
  for (int64_t i = 0; i < 3000 && sides.side.stats().n_stream_parts == 0; ++i) {
    sides.attend_all(1, 30);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  assert_true(sides.side.stats().n_stream_parts > 0);
  assert_true(pinned_bytes(sides.side) > 0);
}

// If the CPU would take longer than pinning, the call waits for the pinning.
void calls_wait_where_that_is_less(void**) {
  const Sides sides("auto", 1e6);
  sides.attend_all(1, 10);
  assert_int_equal(sides.side.stats().n_stream_parts, 0);
  sides.attend_all(4, 20);
  assert_int_equal(sides.side.stats().n_stream_parts, kDeep);
}

// After a refused pin the CPU attends the keys, and a warning says so once.
void refused_pins_end_streaming(void**) {
  const Sides sides("auto", 1e3);
  sides.attend_all(1, 10);
  controls.fail_call(stand_in::kPin, 1, TANDEM_ERROR_OUT_OF_MEMORY);
  for (int64_t i = 0; i < 20; ++i) {
    sides.attend_all(1, 20);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  assert_int_equal(sides.side.stats().n_stream_parts + sides.side.stats().n_host_parts - sides.side.stats().n_joint_parts,
                   21 * kDeep);
  const int64_t n_streamed = sides.side.stats().n_stream_parts;
  for (int64_t i = 0; i < 3; ++i) sides.attend_all(1, 30);
  assert_int_equal(sides.side.stats().n_stream_parts, n_streamed);
}

// A session with a named route streams from its first call on, however long pinning takes.
void named_routes_wait(void**) {
  const Sides sides("stream");
  controls.set_pin_delay(1'000'000);
  sides.attend_all(1, 10);
  assert_int_equal(sides.side.stats().n_stream_parts, kDeep);
  assert_int_equal(sides.side.stats().n_host_parts, 0);
  assert_true(pinned_bytes(sides.side) > 0);
}

// Each layer is pinned as far as it is streamed, and no further.
void layers_are_pinned_by_themselves(void**) {
  const Sides sides("stream");
  tandem_test::Call call(1, 10);
  call.to_device();
  attend(sides.side, call, 1);
  device->wait();
  const int64_t one = pinned_bytes(sides.side);
  assert_in_range(one, kLong * kTokenBytes, kLong * kTokenBytes * 3 / 2);
}

// Makes a call that asks for the pieces of layer 0. Each piece takes 3 ms from then on. Returns after the given time.
void begin_to_pin(const Sides& sides, std::chrono::nanoseconds after) {
  sides.attend_all(1, 10);
  controls.set_pin_delay(3'000'000);
  tandem_test::Call call(2, 11);
  call.to_device();
  attend(sides.side, call, 0);
  std::this_thread::sleep_for(after);
}

// Freed memory is unpinned first, even while the thread pins a piece of it, and can be pinned again.
void trimmed_memory_is_unpinned(void**) {
  for (const int after_ms : {0, 5, 10}) {
    const Sides sides("auto");
    begin_to_pin(sides, std::chrono::milliseconds(after_ms));
    for (const Side* each : {&sides.side, &sides.twin}) OK(tandem_sequence_truncate, each->cache, each->sequence, 0);
    int64_t n_bytes = 0;
    OK(tandem_cache_trim, &n_bytes, sides.side.cache);
    assert_true(n_bytes > 0);
    assert_int_equal(pinned_bytes(sides.side), 0);
    controls.set_pin_delay(0);
    sides.attend_all(300, 20);
    sides.attend_all(1, 30);
    OK(tandem_cache_trim, &n_bytes, sides.side.cache);
    assert_int_equal(n_bytes, 0);
  }
}

// Caches may be released while the thread pins a piece and while pieces wait for it.
void caches_may_go(void**) {
  for (const int64_t after_ns : {0, 2'000'000, 10'000'000}) {
    const int64_t n_pinned = counts.n_pinned, n_unpinned = counts.n_unpinned;
    {
      const Sides sides("auto");
      begin_to_pin(sides, std::chrono::nanoseconds(after_ns));
      OK(tandem_sequence_truncate, sides.side.cache, sides.side.sequence, 10);
      OK(tandem_sequence_drop, sides.side.cache, sides.side.sequence);
    }
    controls.set_pin_delay(0);
    assert_int_equal(counts.n_pinned - n_pinned, counts.n_unpinned - n_unpinned);
  }
}

// Returns the output of a token over a layer that the device has appended. The session is the one that appended it, or a new
// one that has to fill its window from a store that is pinned or not.
std::vector<float> attend_prompt(int64_t window, bool is_filled, bool is_pinned) {
  constexpr int64_t kLength = 1500;
  Side side(true, "all", 0, kDeep, window);
  tandem_test::Call prompt(kLength, 1), token(1, 7);
  prompt.to_device();
  token.to_device();
  for (int32_t l = 0; l < kDeep; ++l) attend(side, prompt, l);
  if (is_pinned) {
    change_session(&side, options_of("stream"));
    for (int32_t l = 0; l < kDeep; ++l) attend(side, token, l);
    OK(tandem_sequence_truncate, side.cache, side.sequence, kLength);
    assert_true(pinned_bytes(side) > 0);
  }
  if (is_filled) change_session(&side, options_of("host", window));
  controls.set_delay(200'000);  // copies are late, so a buffer that is overwritten or attended too early is noticed
  attend(side, token, 1);
  std::vector<float> output = token.output();
  controls.set_delay(0);
  assert_int_equal(side.stats().filled_kv_bytes > 0, is_filled);
  return output;
}

// Windows are filled through buffers of one page: the same bits, and NaN where no row belongs.
void windows_have_the_stores_rows(void**) {
  for (const int64_t window : {64, 700, 4096}) {
    const std::vector<float> appended = attend_prompt(window, false, false);
    for (const bool is_pinned : {false, true}) {
      const std::vector<float> filled = attend_prompt(window, true, is_pinned);
      assert_memory_equal(filled.data(), appended.data(), appended.size() * sizeof(float));
    }
  }
}

}  // namespace

int main() {
  tandem::least_pinned_bytes = kPiece;
  tandem::staged_at_once = 1;  // one page at a time
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(calls_do_not_wait, forget),
      cmocka_unit_test_teardown(calls_wait_where_that_is_less, forget),
      cmocka_unit_test_teardown(refused_pins_end_streaming, forget),
      cmocka_unit_test_teardown(named_routes_wait, forget),
      cmocka_unit_test_teardown(layers_are_pinned_by_themselves, forget),
      cmocka_unit_test_teardown(trimmed_memory_is_unpinned, forget),
      cmocka_unit_test_teardown(caches_may_go, forget),
      cmocka_unit_test_teardown(windows_have_the_stores_rows, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
