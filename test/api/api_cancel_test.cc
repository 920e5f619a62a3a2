// SPDX-License-Identifier: MIT
// A call stopped by its flag or its progress callback changes nothing, and gives the same answer when it is repeated.
// Progress is reported on the calling thread, grows, and ends at its total.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <thread>

#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int64_t kPrompt = 600;

// A progress callback that stops the call or waits at a chosen moment.
struct Listener {
  std::thread::id caller = std::this_thread::get_id();
  int64_t done = 0, total = 0, n_calls = 0;
  int64_t stops_at = -1;  // number of the callback that stops the call; -1: none
  std::atomic<int32_t>* waits_for = nullptr;
  bool is_wrong = false;  // wrong thread or wrong numbers

  static int32_t hear(int64_t done, int64_t total, void* user) {
    auto& self = *static_cast<Listener*>(user);
    self.is_wrong |= std::this_thread::get_id() != self.caller || done < self.done || done > total || total <= 0 ||
                     (self.n_calls > 0 && total != self.total);
    self.done = done;
    self.total = total;
    while (self.waits_for != nullptr && self.waits_for->load() == 0) std::this_thread::yield();
    return self.n_calls++ == self.stops_at ? 7 : 0;
  }
};

// An append of q_len tokens to both layers of a world, inside a step or not. The outputs hold NaN before.
struct Append : LayerCall {
  Append(const World& world, int64_t n, int32_t layer_idx, int64_t seed = 50)
      : LayerCall(world.sequence, layer_idx, n, seed) {
    for (Tensor* output : {&o, &lse}) std::memset(output->values.data(), 0xff, output->values.size() * sizeof(float));
  }
  void watch(Listener* listener) {
    args.progress = Listener::hear;
    args.progress_user = listener;
  }
  bool is_untouched() const {
    for (const Tensor* output : {&o, &lse})
      for (const float x : output->values)
        if (!std::isnan(x)) return false;
    return true;
  }
};

std::vector<int64_t> selected(const World& world, int32_t layer_idx) {
  std::vector<int64_t> tokens(4096);
  int64_t n = 0;
  OK(tandem_session_selection, tokens.data(), nullptr, 4096, &n, world.session, world.sequence, layer_idx, 1, 0);
  tokens.resize(static_cast<size_t>(n));
  return tokens;
}

tandem_engine_options options_of(int32_t n_threads, int32_t matmul_rows) {
  tandem_engine_options options = small_engine_options();
  options.n_threads = n_threads;
  options.matmul_rows = matmul_rows;
  return options;
}

void expect_cancelled(const World& world, Append& append, const char* field) {
  const Snapshot before(world);
  const auto kept = selected(world, append.args.layer_idx);
  tandem_error* error = nullptr;
  const int32_t status = tandem_attend(world.session, &append.args, &error);
  const std::string got = tandem_error_field(error), message = tandem_error_message(error);
  tandem_error_release(error);
  assert_int_equal(status, TANDEM_ERROR_CANCELLED);
  assert_string_equal(got.c_str(), field);
  assert_true(message.find("the call was stopped") != std::string::npos);
  assert_true(append.is_untouched());
  before.expect_same(Snapshot(world));
  assert_true(kept == selected(world, append.args.layer_idx));
}

// Returns the answers to an append and to the ten tokens after it.
std::vector<float> answers(World& world, int32_t layer_idx, Append& append) {
  OK(tandem_attend, world.session, &append.args);
  std::vector<float> all = append.o.values;
  for (int i = 0; i < 10; ++i) {
    Append one(world, 1, layer_idx, 70 + i);
    OK(tandem_attend, world.session, &one.args);
    all.insert(all.end(), one.o.values.begin(), one.o.values.end());
    all.insert(all.end(), one.lse.values.begin(), one.lse.values.end());
  }
  return all;
}

// Stops the call at three pieces of work, then lets it run. The answer must equal that of a world without stops.
void stop_and_go_on(int32_t matmul_rows) {
  const tandem_engine_options options = options_of(1, matmul_rows);
  for (int32_t layer_idx = 0; layer_idx < kLayers; ++layer_idx) {
    World world(&options), other(&options);
    OK(tandem_sequence_reserve, world.cache, world.sequence, kPrompt);
    for (int64_t stops_at = 0; stops_at < 3; ++stops_at) {
      Append append(world, kPrompt, layer_idx);
      Listener listener;
      listener.stops_at = stops_at;
      append.watch(&listener);
      expect_cancelled(world, append, "progress");
      assert_int_equal(listener.n_calls, stops_at + 1);
      assert_false(listener.is_wrong);
    }
    Append append(world, kPrompt, layer_idx), unwatched(other, kPrompt, layer_idx);
    Listener listener;
    append.watch(&listener);
    assert_true(answers(world, layer_idx, append) == answers(other, layer_idx, unwatched));
    assert_true(listener.n_calls > 3 && listener.done == listener.total && !listener.is_wrong);
    assert_true(selected(world, layer_idx) == selected(other, layer_idx));
  }
}

void test_progress_stops_a_call(void**) {
  stop_and_go_on(1 << 20);  // kernels of decode
  stop_and_go_on(1);        // matrix products
}

void test_the_last_piece_can_stop_it_too(void**) {
  const tandem_engine_options options = options_of(1, 1);
  World world(&options);
  OK(tandem_sequence_reserve, world.cache, world.sequence, kPrompt);
  Listener counter;
  {
    World other(&options);
    Append append(other, kPrompt, 0);
    append.watch(&counter);
    OK(tandem_attend, other.session, &append.args);
  }
  Append append(world, kPrompt, 0);
  Listener listener;
  listener.stops_at = counter.n_calls - 1;
  append.watch(&listener);
  expect_cancelled(world, append, "progress");
  assert_true(listener.done == listener.total);
}

// A stopped call skips the rest of its work: stopped at its first piece, it takes less than half of its time.
void test_a_stop_saves_time(void**) {
  const tandem_engine_options options = options_of(1, 1);
  World world(&options);
  OK(tandem_sequence_reserve, world.cache, world.sequence, 4 * kPrompt);
  const auto spent = [&](int64_t stops_at, int32_t expected) {
    Append append(world, 4 * kPrompt, 0);
    Listener listener;
    listener.stops_at = stops_at;
    append.watch(&listener);
    const clock_t start = std::clock();  // processor time, because the machine may be shared
    assert_int_equal(tandem_attend(world.session, &append.args, nullptr), expected);
    const clock_t end = std::clock();
    OK(tandem_sequence_truncate, world.cache, world.sequence, kTokens);
    return end - start;
  };
  clock_t whole = spent(-1, TANDEM_OK), stopped = spent(0, TANDEM_ERROR_CANCELLED);
  for (int i = 0; i < 4; ++i) {
    whole = std::min(whole, spent(-1, TANDEM_OK));
    stopped = std::min(stopped, spent(0, TANDEM_ERROR_CANCELLED));
  }
  print_message("CPU time of an append of %lld tokens: %ld, stopped %ld\n", 4 * static_cast<long long>(kPrompt),
                static_cast<long>(whole), static_cast<long>(stopped));
  assert_true(2 * stopped < whole);
}

void test_a_flag_that_is_set_before(void**) {
  World world;
  const int32_t cancel = 1;
  for (const int64_t n : {kPrompt, int64_t{1}}) {
    Append append(world, n, 0);
    append.args.cancel = &cancel;
    expect_cancelled(world, append, "cancel");
  }
}

void test_a_flag_that_another_thread_sets(void**) {
  const tandem_engine_options options = options_of(3, 1);
  World world(&options), other(&options);
  OK(tandem_sequence_reserve, world.cache, world.sequence, 4 * kPrompt);
  for (int i = 0; i < 20; ++i) {
    std::atomic<int32_t> cancel{0};
    static_assert(sizeof cancel == sizeof(int32_t));
    Append append(world, 4 * kPrompt, 0);
    append.args.cancel = reinterpret_cast<const int32_t*>(&cancel);
    Listener listener;
    listener.waits_for = &cancel;  // its first callback may come only when all work is done and nothing is written
    append.watch(&listener);
    std::thread setter([&cancel, i] {
      std::this_thread::sleep_for(std::chrono::microseconds(200 * i));
      cancel.store(1);
    });
    expect_cancelled(world, append, "cancel");
    setter.join();
    assert_false(listener.is_wrong);
  }
  Append append(world, 4 * kPrompt, 0), unwatched(other, 4 * kPrompt, 0);
  const int32_t never = 0;
  append.args.cancel = &never;
  assert_true(answers(world, 0, append) == answers(other, 0, unwatched));
}

// Sets the flag for a few microseconds at a time. A call either misses the flag and returns a whole answer, or is
// cancelled.
void test_a_flag_that_is_cleared_again(void**) {
  const tandem_engine_options options = options_of(3, 1);
  World world(&options), other(&options);
  Append whole(other, kPrompt, 0);
  OK(tandem_attend, other.session, &whole.args);
  std::atomic<int32_t> cancel{0};
  std::atomic<bool> has_ended{false};
  std::thread setter([&] {
    for (int i = 0; !has_ended; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(100 * (i % 16)));
      cancel = 1;
      for (const auto begin = std::chrono::steady_clock::now();
           std::chrono::steady_clock::now() - begin < std::chrono::microseconds(5);) {
      }
      cancel = 0;
    }
  });
  bool is_wrong = false;
  for (int i = 0; i < 200; ++i) {
    Append append(world, kPrompt, 0);
    append.args.cancel = reinterpret_cast<const int32_t*>(&cancel);
    const int32_t status = tandem_attend(world.session, &append.args, nullptr);
    const bool is_whole = append.o.values == whole.o.values && append.lse.values == whole.lse.values;
    is_wrong |= status == TANDEM_OK ? !is_whole : status != TANDEM_ERROR_CANCELLED;
    OK(tandem_sequence_truncate, world.cache, world.sequence, kTokens);
  }
  has_ended = true;
  setter.join();
  assert_false(is_wrong);
}

// A step continues after a stopped call.
void test_inside_a_step(void**) {
  World world;
  const int64_t q_len = 3;
  OK(tandem_step_begin, world.session, &world.sequence, &q_len, 1, nullptr);
  for (int32_t layer_idx = 0; layer_idx < kLayers; ++layer_idx) {
    const int32_t cancel = 1;
    Append append(world, q_len, layer_idx);
    append.args.cancel = &cancel;
    assert_int_equal(tandem_attend(world.session, &append.args, nullptr), TANDEM_ERROR_CANCELLED);
    append.args.cancel = nullptr;
    OK(tandem_attend, world.session, &append.args);
  }
  OK(tandem_step_end, world.session, nullptr);
  int64_t length = 0;
  OK(tandem_sequence_length, &length, world.cache, world.sequence, 1);
  assert_int_equal(length, kTokens + q_len);
}

// With many workers only the calling thread gets progress, and it always gets the final callback.
void test_progress_is_the_callers(void**) {
  const tandem_engine_options options = options_of(4, 0);
  World world(&options);
  for (const int64_t n : {int64_t{1}, int64_t{7}, kPrompt, 3 * kPrompt}) {
    Append append(world, n, 0);
    Listener listener;
    append.watch(&listener);
    OK(tandem_attend, world.session, &append.args);
    assert_true(listener.n_calls > 0 && listener.done == listener.total && !listener.is_wrong);
  }
}

void test_refused(void**) {
  World world;
  Append append(world, 1, 0);
  append.args.progress_user = &world;
  const auto attend = [&](tandem_error** error) { return tandem_attend(world.session, &append.args, error); };
  check_all_refused(world, {{"user", "tandem_attend", TANDEM_ERROR_INVALID_ARGUMENT, "progress_user", "0x", attend}});
  append.args.progress_user = nullptr;
  append.args.cancel = reinterpret_cast<const int32_t*>(append.o.values.data() + 5);
  check_all_refused(world, {{"overlap", "tandem_attend", TANDEM_ERROR_INVALID_ARGUMENT, "o.data", "cancel", attend}});
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_progress_stops_a_call),
      cmocka_unit_test(test_the_last_piece_can_stop_it_too),
      cmocka_unit_test(test_a_stop_saves_time),
      cmocka_unit_test(test_a_flag_that_is_set_before),
      cmocka_unit_test(test_a_flag_that_another_thread_sets),
      cmocka_unit_test(test_a_flag_that_is_cleared_again),
      cmocka_unit_test(test_inside_a_step),
      cmocka_unit_test(test_progress_is_the_callers),
      cmocka_unit_test(test_refused),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
