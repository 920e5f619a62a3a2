// SPDX-License-Identifier: MIT
// The thread that meets the device lacks memory at any point. The next call reports it, once. The tokens of the call that
// lacked memory are gone. Then the session works as before.
#include <pthread.h>

#include <chrono>
#include <thread>

#include "device/step_runner.h"
#include "failing_new.h"
#include "one_in.h"

using namespace tandem_test;
using namespace failing_new;

namespace {

bool is_hand_over() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::strcmp(name, "tandem-device") == 0;
}

// Makes allocations of that thread fail from now on.
void fail_from(int64_t nth, bool goes_on) {
  n_news = 0;
  fails_at = nth;
  for_ever = goes_on;
  is_watched = is_hand_over;
  armed = true;
}

// The lengths of calls made one after another: an append, then single tokens, during which blocks leave the window.
constexpr int64_t kLens[] = {kPrompt, 300, 1, 1, 40, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
constexpr int64_t kCalls = std::size(kLens);

int64_t start_of(int64_t call_idx) {
  int64_t n = 0;
  for (int64_t i = 0; i < call_idx; ++i) n += kLens[i];
  return n;
}

struct Selecting : Side {
  explicit Selecting(const char* policy, const char* route = nullptr) : Side(true, policy) {
    tandem_session_options options = options_of(policy);
    options.beta = 0.0f;  // every key is kept, so outputs are those over all keys
    options.route = route;
    if (route != nullptr) options.stream_fraction = 0.5, options.stream_buffer_bytes = 64 * kDim * 4;
    change_session(this, options);
  }
};

// Makes the call on the device and returns its status.
int32_t try_call(const Side& side, Call* call) {
  const tandem_attend_args args = call->args(side);
  tandem_error* error = nullptr;
  const int32_t status = tandem_attend(side.session, &args, &error);
  if (status != TANDEM_OK && std::strstr(tandem_error_message(error), "other calls may follow") == nullptr)
    fail_msg("%s", tandem_error_message(error));
  tandem_error_release(error);
  return status;
}

// Returns the length once nothing is in flight and lost tokens are rolled back.
int64_t settled_length(const Side& side) {
  side.digest();
  return side.length();
}

// Makes the calls in turn, each to its end before the next one, and repeats those that were lost. Returns how often the lack
// was reported.
int64_t run_calls(const Side& side, const Side& twin, int64_t most_told) {
  int64_t n_told = 0;
  for (int64_t i = 0; i < kCalls;) {
    Call call(kLens[i], 10 * i), on_host(kLens[i], 10 * i);
    call.to_device();
    const int32_t status = try_call(side, &call);
    if (status == TANDEM_OK) {
      attend(twin, on_host);
      if (settled_length(side) == start_of(i + 1)) assert_close(call.output(), on_host.output()), ++i;
      continue;
    }
    assert_int_equal(status, TANDEM_ERROR_OUT_OF_MEMORY);
    if (++n_told == most_told) armed = false;
    const int64_t length = settled_length(side);
    while (start_of(i) > length) --i;
    assert_int_equal(start_of(i), length);
    OK(tandem_sequence_truncate, twin.cache, twin.sequence, length);
  }
  return n_told;
}

void lack_once(const char* policy) {
  int64_t n_told_of = 0, n_runs = 0;
  for (int64_t nth = 1;; nth += tandem::test::one_in(), ++n_runs) {
    const Selecting side(policy);
    const Side twin(false);
    fail_from(nth, false);
    const int64_t n_told = run_calls(side, twin, INT64_MAX);
    armed = false;
    assert_true(n_told <= 1);
    n_told_of += n_told;
    assert_true(side.digest() == twin.digest());
    if (n_news < nth) break;
  }
  print_message("%s: %lld allocations failed one by one, %lld were told of\n", policy, static_cast<long long>(n_runs),
                static_cast<long long>(n_told_of));
  if (std::strcmp(policy, "hgca") == 0) assert_true(n_told_of > 3);
}

void a_lack_is_told_once(void**) {
  for (const char* policy : {"hgca", "all"}) lack_once(policy);
}

// Memory is back after three reports.
void a_lack_may_go_on(void**) {
  const Selecting side("hgca");
  const Side twin(false);
  fail_from(1, true);
  assert_int_equal(run_calls(side, twin, 3), 3);
}

// Further calls are made before the lack is known.
void calls_behind_a_lack_are_lost(void**) {
  int64_t n_told_of = 0;
  for (int64_t nth = 1; nth < 60; nth += 2 + tandem::test::one_in()) {
    const Selecting side("hgca");
    const Side twin(false);
    constexpr int64_t kMore = 12;
    attend_twins(side, twin, kPrompt, 1);
    OK(tandem_engine_drain, side.engine, -1);
    controls.set_delay(2'000'000);
    fail_from(nth, false);
    std::vector<std::unique_ptr<Call>> calls;
    int64_t n_told = 0;
    for (int64_t i = 0; i < kMore; ++i) {
      calls.push_back(std::make_unique<Call>(i % 4 == 0 ? 30 : 1, 100 + i));
      calls.back()->to_device();
      n_told += try_call(side, calls.back().get()) != TANDEM_OK;
    }
    controls.set_delay(0);
    OK(tandem_engine_drain, side.engine, -1);
    armed = false;
    assert_true(n_told <= 1);
    Call last(1, 7);
    last.to_device();
    if (try_call(side, &last) != TANDEM_OK) ++n_told, attend(side, last);
    assert_true(n_told <= 1);
    n_told_of += n_told;
    OK(tandem_sequence_truncate, side.cache, side.sequence, kPrompt);
    for (int64_t i = 0; i < 20; ++i) attend_twins(side, twin, 1, 1000 + i);
  }
  assert_true(n_told_of > 0);
}

// The queries of lost calls do not count in later selections, as if they had never been made.
void lost_calls_do_not_count(void**) {
  const Side side(true, "hgca"), twin(false, "hgca");
  attend_twins(side, twin, kPrompt, 1);
  for (int64_t i = 0; i < 20; ++i) attend_twins(side, twin, 1, 100 + 10 * i);
  for (int64_t i = 0; i < 60; ++i) {
    if (i % 10 == 0) {
      assert_true(side.stats().selected_keys > 0);
      std::vector<std::unique_ptr<Call>> lost;
      bool is_told = false;
      fail_from(1, true);
      for (int64_t j = 0; j < 4 && !is_told; ++j) {
        lost.push_back(std::make_unique<Call>(1, 5000 + 40 * i + 10 * j));
        lost.back()->to_device();
        is_told = try_call(side, lost.back().get()) != TANDEM_OK;
      }
      OK(tandem_engine_drain, side.engine, -1);
      armed = false;
      if (!is_told) assert_int_equal(try_call(side, lost.back().get()), TANDEM_ERROR_OUT_OF_MEMORY);
      assert_int_equal(settled_length(side), twin.length());
    }
    attend_twins(side, twin, 1, 1000 + 10 * i);
    assert_int_equal(side.stats().selected_keys, twin.stats().selected_keys);
  }
}

tandem_engine* make_multiplying_engine(const tandem_engine_options& options) {
  tandem_engine_options wanted = options;
  wanted.matmul_rows = 1;
  tandem_engine* engine = nullptr;
  OK(tandem_engine_create, &engine, &wanted);
  return engine;
}

// Rows in flight to the device do not change, although the device will not read them. The engine's matmul_rows is fixed, so
// attention takes no memory that could lack, whatever number the process would measure.
void lost_calls_end_when_their_keys_are_sent(void**) {
  const auto usual = make_engine;
  make_engine = make_multiplying_engine;
  const Selecting side("all", "host+stream");
  make_engine = usual;
  const Side twin(false);
  for (const Side* one : {static_cast<const Side*>(&side), &twin}) {
    const Tensor k({900, kKvHeads, kDim}, 1), v({900, kKvHeads, kDim}, 2);
    OK(tandem_sequence_append, one->cache, one->sequence, kLayer, &k.view, &v.view, nullptr);
  }
  Call call(100, 5);
  call.to_device();
  controls.set_delay(3'000'000);
  fail_from(1, true);
  assert_int_equal(try_call(side, &call), TANDEM_OK);
  OK(tandem_engine_drain, side.engine, -1);
  armed = false;
  const int64_t n_sent = counts.n_strided;
  call.output();
  controls.set_delay(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  assert_true(n_sent > 0);
  assert_int_equal(counts.n_strided, n_sent);
  assert_int_equal(try_call(side, &call), TANDEM_ERROR_OUT_OF_MEMORY);
  attend_twins(side, twin, 1, 7);
}

// A planned step is rolled back as a whole, and the next step uses the graph.
void a_step_without_memory_is_taken_back(void**) {
  constexpr int64_t kOneEach[] = {1, 1};
  int64_t n_told = 0;
  for (int64_t nth = 1;; nth += (nth + 7) / 8 + tandem::test::one_in() - 1) {
    Runner runner(150, "hgca");
    fail_from(nth, false);
    for (int64_t step = 0; step < 24;) {
      runner.set_inputs(step);
      const uint64_t before = runner.digest(0);
      const int32_t status = tandem_step_begin(runner.side.session, runner.ids, kOneEach, 2, runner.stream, nullptr);
      if (status != TANDEM_OK) {
        assert_int_equal(status, TANDEM_ERROR_OUT_OF_MEMORY);
        assert_true(runner.digest(0) == before);
        step = runner.side.length() - 150;
        ++n_told;
        continue;
      }
      if (runner.graph == nullptr) runner.capture(kOneEach);
      assert_true(controls.launch(runner.graph, runner.stream));
      runner.end();
      runner.digest(0);
      runner.outputs();  // a lost step still reads its inputs
      for (int32_t l = 0; l < kStepLayers; ++l) assert_int_equal(runner.side.length(l), runner.side.length(0));
      if (runner.side.length() == 150 + step + 1)
        ++step;
      else
        assert_int_equal(runner.side.length(), 150 + step);
    }
    armed = false;
    for (int32_t l = 0; l < kStepLayers; ++l) assert_int_equal(runner.side.length(l), 150 + 24);
    for (const float value : runner.outputs()) assert_true(std::isfinite(value));
    if (n_news < nth) break;
  }
  print_message("%lld steps were taken back\n", static_cast<long long>(n_told));
  assert_true(n_told > 5);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(a_lack_is_told_once, forget),
      cmocka_unit_test_teardown(a_lack_may_go_on, forget),
      cmocka_unit_test_teardown(calls_behind_a_lack_are_lost, forget),
      cmocka_unit_test_teardown(lost_calls_do_not_count, forget),
      cmocka_unit_test_teardown(lost_calls_end_when_their_keys_are_sent, forget),
      cmocka_unit_test_teardown(a_step_without_memory_is_taken_back, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
