// SPDX-License-Identifier: MIT
// Measures how long a cancelled append still runs: at most 50 ms, whenever the flag is set.
//
// A thread sets the flag before the call and at moments spread over the whole call. The layer has a sliding window, so
// that the call's time grows with the length alone. Memory, storing K and V, packing q, attending, merging and writing all
// get moments.
//
// On a shared machine wall-clock time is noisy. The test counts the processor time of all threads of this process between
// the flag and the return, which includes the page faults and frees of a stall. A moment that takes too long is tried
// again: a stall of the library recurs, load of another process does not. The wall clock has a wide bound of its own, for a
// call that sleeps.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <thread>

#include "api_world.h"

using namespace tandem_test;

namespace {

using Clock = std::chrono::steady_clock;
constexpr double kMostMs = 50, kMostWallMs = 500;
constexpr double kNever = 1e9;  // ms
constexpr int kTries = 4;
constexpr int32_t kHeads = 8;

int64_t append_tokens() { return getenv("TANDEM_TEST_FULL") != nullptr ? 400'000 : 65'536; }
int moments() { return getenv("TANDEM_TEST_FULL") != nullptr ? 32 : 14; }

double cpu_ms() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}
double ms(Clock::duration d) { return std::chrono::duration<double, std::milli>(d).count(); }

// Zeros, for tensors whose values do not matter. Pages are allocated when they are touched.
struct LargeTensor {
  std::unique_ptr<float, void (*)(void*)> data;
  tandem_tensor view = {};

  LargeTensor(int64_t n_tokens, int64_t n_heads)
      : data(static_cast<float*>(calloc(static_cast<size_t>(n_tokens * n_heads * kDim), sizeof(float))), free) {
    assert_non_null(data.get());
    const int64_t shape[3] = {n_tokens, n_heads, kDim};
    OK(tandem_tensor_init, &view, TANDEM_F32, data.get(), 3, shape);
  }
};

// One layer and its tensors. Each call gets a new session and sequence.
struct LongWorld {
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  int64_t sequence = 0;

  LongWorld(int64_t sliding_window, const float* sinks) {
    const tandem_engine_options options = small_engine_options();
    OK(tandem_engine_create, &engine, &options);
    tandem_layer_options layer = plain_layer();
    layer.n_q_heads = kHeads;
    layer.sliding_window_tokens = sliding_window;
    layer.sinks = sinks;
    OK(tandem_model_create, &model, &layer, 1);
    OK(tandem_cache_create, &cache, engine, model, nullptr);
  }
  ~LongWorld() {
    end();
    tandem_cache_release(cache);
    tandem_model_release(model);
    tandem_engine_release(engine);
  }
  LongWorld(const LongWorld&) = delete;

  void begin(const char* policy) {
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    options.policy = policy;
    options.window_tokens = 128;
    OK(tandem_session_create, &session, cache, &options);
    OK(tandem_sequence_create, &sequence, cache);
  }
  void end() {
    if (session == nullptr) return;
    tandem_session_release(session);
    OK(tandem_sequence_drop, cache, sequence);
    session = nullptr;
  }
};

// Outcome of one stopped call.
struct Outcome {
  int32_t status = TANDEM_OK;
  bool was_set = false;  // the flag was set before the call returned
  double cpu_ms = 0, wall_ms = 0;
  double call_ms = 0;  // the whole call
};

struct Flag {
  std::atomic<int32_t> is_set{0}, attended{0};
  static_assert(sizeof is_set == sizeof(int32_t));
  static int32_t hear(int64_t done, int64_t total, void* user) {
    if (done == total) static_cast<Flag*>(user)->attended = 1;
    return 0;
  }
};

// after: ms from the start of the call, or from the end of its attention if from_end. Below 0: the flag is set before the
// call.
Outcome attend(LongWorld& world, tandem_attend_args args, double after, bool from_end) {
  Flag flag;
  Outcome outcome;
  std::atomic<bool> has_begun{false}, has_ended{false};
  double cpu_at_set = 0;
  Clock::time_point set_at, begin;
  const auto set = [&] {
    cpu_at_set = cpu_ms();
    set_at = Clock::now();
    outcome.was_set = !has_ended;
    flag.is_set = 1;
  };
  std::thread setter([&] {
    while (!has_begun) std::this_thread::yield();
    if (after < 0 || after == kNever) return;
    while (from_end && flag.attended == 0 && !has_ended) std::this_thread::sleep_for(std::chrono::microseconds(50));
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(after));
    set();
  });
  args.cancel = reinterpret_cast<const int32_t*>(&flag.is_set);
  args.progress = Flag::hear;
  args.progress_user = &flag;
  if (after < 0) set();
  begin = Clock::now();
  has_begun = true;
  outcome.status = tandem_attend(world.session, &args, nullptr);
  const double cpu_at_end = cpu_ms();
  const Clock::time_point end = Clock::now();
  has_ended = true;
  setter.join();
  outcome.call_ms = ms(end - begin);
  if (set_at > end) outcome.was_set = false;
  outcome.cpu_ms = outcome.was_set ? cpu_at_end - cpu_at_set : 0;
  outcome.wall_ms = outcome.was_set ? ms(end - set_at) : 0;
  return outcome;
}

struct Worst {
  double cpu_ms = 0, wall_ms = 0;
  int n_cancelled = 0;

  // Measures one moment. Repeats it if the call took too long and returns the best try.
  template <typename Call>
  void at(double moment, Call call) {
    double cpu = 1e9, wall = 1e9;
    for (int i = 0; i < kTries && (cpu > kMostMs || wall > kMostWallMs); ++i) {
      const Outcome outcome = call(moment);
      cpu = std::min(cpu, outcome.cpu_ms);
      wall = std::min(wall, outcome.wall_ms);
      n_cancelled += outcome.status == TANDEM_ERROR_CANCELLED;
    }
    if (cpu > kMostMs || wall > kMostWallMs)
      print_error("the flag was set at %.1f ms: the call went on for %.1f ms, with a processor for %.1f ms\n", moment, wall,
                  cpu);
    cpu_ms = std::max(cpu_ms, cpu);
    wall_ms = std::max(wall_ms, wall);
  }
  void check(const char* of) const {
    print_message("%s: after the flag %.1f ms of processors at most, %.1f ms by the wall; %d cancelled\n", of, cpu_ms,
                  wall_ms, n_cancelled);
    assert_true(cpu_ms <= kMostMs);
    assert_true(wall_ms <= kMostWallMs);
  }
};

// Makes every call the first of its session, so that its work space is new.
void sweep(const char* policy, const float* sinks) {
  const int64_t n = append_tokens();
  LongWorld world(64, sinks);
  const LargeTensor q(n, kHeads), o(n, kHeads), k(n, kKvHeads), v(n, kKvHeads);
  const auto call_at = [&](double moment, bool from_end) {
    world.begin(policy);
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = 1;
    args.sequences = &world.sequence;
    args.q_lens = &n;
    args.q = &q.view;
    args.k = &k.view;
    args.v = &v.view;
    args.o = &o.view;
    uint64_t before = 0, after = 0;
    OK(tandem_sequence_digest, &before, world.cache, world.sequence);
    const Outcome outcome = attend(world, args, moment, from_end);
    int64_t length = 0;
    OK(tandem_sequence_length, &length, world.cache, world.sequence, 0);
    assert_true(outcome.status == TANDEM_OK ? length == n : outcome.status == TANDEM_ERROR_CANCELLED && length == 0);
    if (outcome.status != TANDEM_OK) {
      OK(tandem_sequence_digest, &after, world.cache, world.sequence);
      assert_true(before == after);
    }
    world.end();
    return outcome;
  };
  double whole_ms = 1e9;
  for (int i = 0; i < 2; ++i) whole_ms = std::min(whole_ms, call_at(kNever, true).call_ms);
  Worst worst;
  const auto from_begin = [&](double moment) { return call_at(moment, false); };
  const auto from_end = [&](double moment) { return call_at(moment, true); };
  worst.at(-1, from_begin);
  for (int i = 0; i < moments(); ++i) worst.at(whole_ms * i / moments(), from_begin);
  for (int i = 0; i < moments() / 4; ++i) worst.at(whole_ms / 8 * i / (moments() / 4), from_end);
  char text[96];
  snprintf(text, sizeof text, "%s, %lld tokens in %.0f ms", policy, static_cast<long long>(n), whole_ms);
  worst.check(text);
  assert_true(worst.n_cancelled > moments() / 2);
}

void test_an_append_stops_at_once(void**) { sweep("all", nullptr); }

void test_an_append_that_merges_stops_at_once(void**) {
  const std::vector<float> sinks(kHeads, 0.5f);
  sweep("all", sinks.data());
}

// Work after the output cannot be undone: the call returns with its tokens, and the engine's thread continues that work.
void test_a_re_evaluation_is_not_waited_for(void**) {
  const int64_t n_before = 2 * append_tokens(), n = 64;
  LongWorld world(0, nullptr);
  world.begin("hgca");
  {
    const LargeTensor k(n_before, kKvHeads), v(n_before, kKvHeads);
    OK(tandem_sequence_append, world.cache, world.sequence, 0, &k.view, &v.view, nullptr);
  }
  const LargeTensor q(n, kHeads), o(n, kHeads), k(n, kKvHeads), v(n, kKvHeads);
  for (const LargeTensor* each : {&q, &k})
    for (int64_t i = 0; i < n * kKvHeads * kDim; ++i) each->data.get()[i] = noise(i);
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = 1;
  args.sequences = &world.sequence;
  args.q_lens = &n;
  args.q = &q.view;
  args.k = &k.view;
  args.v = &v.view;
  args.o = &o.view;
  const auto kept = [&] {
    std::vector<int64_t> tokens(static_cast<size_t>(n_before));
    int64_t n_kept = 0;
    OK(tandem_session_selection, tokens.data(), nullptr, n_before, &n_kept, world.session, world.sequence, 0, 1, 0);
    tokens.resize(static_cast<size_t>(n_kept));
    return tokens;
  };
  std::vector<int64_t> expected;
  Worst worst;
  for (int i = -1; i < 8; ++i) {
    const auto call_at = [&](double moment) {
      const Outcome outcome = attend(world, args, moment, true);
      int64_t length = 0;
      OK(tandem_sequence_length, &length, world.cache, world.sequence, 0);
      assert_int_equal(length, n_before + (outcome.status == TANDEM_OK ? n : 0));
      if (outcome.status == TANDEM_OK) {  // the result is the same, whichever thread did the re-evaluation
        if (expected.empty()) expected = kept();
        assert_true(kept() == expected);
        assert_true(!expected.empty());
      }
      tandem_session_release(world.session);
      world.session = nullptr;
      OK(tandem_sequence_truncate, world.cache, world.sequence, n_before);
      const int64_t sequence = world.sequence;
      int64_t unused = 0;
      world.begin("hgca");
      unused = world.sequence;
      world.sequence = sequence;
      OK(tandem_sequence_drop, world.cache, unused);
      return outcome;
    };
    if (i < 0)
      (void)call_at(kNever);
    else
      worst.at(i * 4.0, call_at);
  }
  worst.check("re-evaluation");
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_an_append_stops_at_once),
      cmocka_unit_test(test_an_append_that_merges_stops_at_once),
      cmocka_unit_test(test_a_re_evaluation_is_not_waited_for),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
