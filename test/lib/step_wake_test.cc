// SPDX-License-Identifier: MIT
// A step on host tensors keeps the CPU workers awake between its calls, unless its session has sleep_between_calls. With
// that option no step wakes them, whether it ends, is rolled back, or is open when its session is released.
#include "api/api_world.h"
#include "lib/base/handle.h"
#include "lib/machine/engine.h"

using namespace tandem_test;
using tandem::Backend;
using tandem::BackendTable;

namespace {

struct Watch {
  const BackendTable* real = nullptr;
  int n_wakes = 0, n_rests = 0;
} watch;

void wake(void* self) {
  ++watch.n_wakes;
  watch.real->wake(self);
}
void rest(void* self) {
  ++watch.n_rests;
  watch.real->rest(self);
}

tandem_engine* make_watched() {
  static BackendTable table;
  Backend cpu;
  assert_true(tandem::create_cpu_backend({.n_threads = 2}, &cpu).ok());
  watch = {cpu.table};
  table = *cpu.table;
  table.wake = wake;
  table.rest = rest;
  std::shared_ptr<tandem::Engine> engine;
  assert_true(tandem::Engine::create_on({&table, cpu.self}, small_engine_options(), &engine).ok());
  return static_cast<tandem_engine*>(tandem::make_handle(tandem::HandleKind::kEngine, engine));
}

// Counts how often three steps tell the workers to wake and to rest: one that ends, one that is rolled back, and one that
// stays open.
void check(int32_t sleep_between_calls, int n_expected) {
  World world;
  tandem_engine* const engine = make_watched();
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  int64_t sequence = 0, n_tokens = 0;
  OK(tandem_cache_create, &cache, engine, world.model, nullptr);
  tandem_session_options options = world_session_options();
  options.sleep_between_calls = sleep_between_calls;
  OK(tandem_session_create, &session, cache, &options);
  OK(tandem_sequence_create, &sequence, cache);
  constexpr int64_t kOne = 1;
  const auto attend_layers = [&](int32_t n_layers) {
    OK(tandem_step_begin, session, &sequence, &kOne, 1, nullptr);
    for (int32_t l = 0; l < n_layers; ++l) {
      const LayerCall call(sequence, l, 1, 7);
      OK(tandem_attend, session, &call.args);
    }
  };
  attend_layers(kLayers);
  OK(tandem_step_end, session, nullptr);
  attend_layers(1);
  assert_int_equal(tandem_step_end(session, nullptr, nullptr), TANDEM_ERROR_INVALID_STATE);
  OK(tandem_sequence_length, &n_tokens, cache, sequence, 0);
  assert_int_equal(n_tokens, 1);  // rolled back
  attend_layers(1);
  tandem_session_release(session);
  assert_int_equal(watch.n_wakes, n_expected);
  assert_int_equal(watch.n_rests, n_expected);
  tandem_cache_release(cache);
  tandem_engine_release(engine);
}

void steps_keep_workers_awake(void**) { check(0, 3); }
void sleep_between_calls_wakes_nobody(void**) { check(1, 0); }

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(steps_keep_workers_awake),
      cmocka_unit_test(sleep_between_calls_wakes_nobody),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
