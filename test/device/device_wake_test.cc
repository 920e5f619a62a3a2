// SPDX-License-Identifier: MIT
// Workers stay awake as long as a planned step is in flight on the device, which is longer than its calls take.
#include <atomic>

#include "device/step_runner.h"
#include "lib/base/handle.h"
#include "lib/machine/engine.h"

using namespace tandem_test;
using tandem::Backend;
using tandem::BackendTable;

namespace {

struct Watch {
  const BackendTable* real = nullptr;
  std::atomic<int> n_wakes{0}, n_rests{0}, n_attends{0}, n_attends_at_rest{0};
  std::atomic<bool> goes_on{true};
} watch;

tandem::Status attend(void* self, const tandem::AttendJob* jobs, int32_t n_jobs) {
  watch.goes_on.wait(false);
  ++watch.n_attends;
  return watch.real->attend(self, jobs, n_jobs);
}
void wake(void* self) {
  ++watch.n_wakes;
  watch.real->wake(self);
}
void rest(void* self) {
  ++watch.n_rests;
  watch.n_attends_at_rest = watch.n_attends.load();
  watch.real->rest(self);
}

tandem_engine* make_watched(const tandem_engine_options& options) {
  static BackendTable table;
  Backend cpu;
  assert_true(tandem::create_cpu_backend({.n_threads = 2}, &cpu).ok());
  watch.real = cpu.table;
  table = *cpu.table;
  table.attend = attend;
  table.wake = wake;
  table.rest = rest;
  std::shared_ptr<tandem::Engine> engine;
  assert_true(tandem::Engine::create_on({&table, cpu.self}, options, &engine).ok());
  return static_cast<tandem_engine*>(tandem::make_handle(tandem::HandleKind::kEngine, engine));
}

void until_the_step_is_done(void**) {
  make_engine = make_watched;
  Runner runner(150);
  constexpr int64_t kOneEach[] = {1, 1};
  for (int step = 1; step <= 3; ++step) {
    watch.n_attends = 0;
    watch.goes_on = false;
    runner.begin(kOneEach);
    assert_int_equal(watch.n_wakes, step);
    runner.attend_layers(kOneEach);
    runner.end();
    assert_int_equal(watch.n_rests, step - 1);  // the host's part is not done in any layer
    watch.goes_on = true;
    watch.goes_on.notify_all();
    OK(tandem_engine_drain, runner.side.engine, -1);
    assert_int_equal(watch.n_rests, step);
    assert_int_equal(watch.n_attends_at_rest, kStepLayers);
  }
}

// Nothing was in flight any more when the step ended.
void or_at_its_end(void**) {
  Runner runner(150);
  constexpr int64_t kOneEach[] = {1, 1};
  const int n_rests = watch.n_rests;
  runner.begin(kOneEach);
  runner.attend_layers(kOneEach);
  runner.outputs();
  while (runner.side.stats().n_host_parts < kStepLayers) sched_yield();
  assert_int_equal(watch.n_rests, n_rests);
  runner.end();
  OK(tandem_engine_drain, runner.side.engine, -1);
  assert_int_equal(watch.n_rests, n_rests + 1);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(until_the_step_is_done, forget),
      cmocka_unit_test_teardown(or_at_its_end, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
