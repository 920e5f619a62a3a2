// SPDX-License-Identifier: MIT
// An engine with a device under failing allocations. Outputs are those without a device. Whichever allocation fails while
// the engine is made, a device that was opened is closed. Functions that must not fail work without memory.
#include <thread>

#include "api/api_scenario.h"
#include "device/stand_in_host.h"
#include "device/step_runner.h"
#include "failing_new.h"
#include "lib/rates/profile.h"

using namespace tandem_test;
using namespace failing_new;

namespace {

constexpr char kModule[] = STAND_IN_MODULES "/libtandem-standin.so";

tandem_engine_options device_options() {
  tandem_engine_options options = small_engine_options();
  options.backend = stand_in::kName;
  options.backend_path = kModule;
  return options;
}

void test_same_answers(void**) {
  Scenario reference(small_engine_options(), false, false), scenario(device_options(), false, false);
  assert_int_equal(reference.run({[] {}, [] {}}), 0);
  assert_int_equal(scenario.run({[] {}, [] {}}), 0);
  expect_same_answers(reference, scenario);
}

void test_nothing_stays_behind(void**) {
  const tandem_engine_options options = device_options();
  const stand_in::Counts& counts = *stand_in::find_function<stand_in::CountsFn>(stand_in::kCountsSymbol)();
  int64_t n_failed = 0, n_failed_open = 0;
  for (int32_t status = TANDEM_ERROR_OUT_OF_MEMORY; status != TANDEM_OK;) {
    const int64_t n_opened = counts.n_opened;
    tandem_engine* engine = nullptr;
    n_news = 0;
    fails_at = n_failed + 1;
    armed = true;
    status = tandem_engine_create(&engine, &options, nullptr);
    armed = false;
    if (status != TANDEM_OK) {
      assert_int_equal(status, TANDEM_ERROR_OUT_OF_MEMORY);
      assert_null(engine);
      ++n_failed;
      n_failed_open += counts.n_opened - n_opened;
    }
    tandem_engine_release(engine);
    assert_int_equal(counts.n_opened, counts.n_closed);
  }
  print_message("%lld allocations failed one by one, %lld of them with the device open\n", static_cast<long long>(n_failed),
                static_cast<long long>(n_failed_open));
  assert_true(n_failed > 20);
  assert_true(n_failed_open > 0);
  assert_int_equal(counts.n_allocated, counts.n_released);
}

// The stand-in's memory is not the program's, whose allocations all may fail.
void test_memory_of_its_own(void**) {
  stand_in::Host host;
  const tandem::DeviceTable& table = host.table;
  void* data = nullptr;
  const int32_t value = 7;
  int32_t copy = 0;
  n_news = 0;
  fails_at = 1;
  for_ever = armed = true;
  const int32_t statuses[] = {
      table.allocate(host.self, sizeof copy, &data, &host.error),
      table.copy(host.self, data, &value, sizeof copy, nullptr, &host.error),
      table.copy(host.self, &copy, data, sizeof copy, nullptr, &host.error),
      table.wait(host.self, nullptr, &host.error),
  };
  for_ever = armed = false;
  table.release(host.self, data);
  for (const int32_t status : statuses) assert_int_equal(status, TANDEM_OK);
  assert_int_equal(n_news, 0);
  assert_int_equal(copy, value);
}

// An unfinished step is rolled back when the session is released, although no call came after it.
void test_release_takes_back(void**) {
  constexpr int64_t kOneEach[] = {1, 1};
  Runner runner(150, "hgca");
  runner.begin(kOneEach);
  runner.attend_layers(kOneEach);
  runner.end();
  const uint64_t before = runner.digest(0);
  runner.begin(kOneEach);
  runner.attend_layers(kOneEach, 1);
  runner.end();
  OK(tandem_engine_drain, runner.side.engine, -1);
  n_news = 0;
  fails_at = 1;
  for_ever = armed = true;
  tandem_session_release(runner.side.session);
  for_ever = armed = false;
  runner.side.session = nullptr;
  assert_int_equal(runner.side.length(), 151);
  assert_true(runner.digest(0) == before);
}

// If an append in parts runs out of memory at any point, no row of it stays.
void test_appends_take_back(void**) {
  constexpr int64_t kLong = 600, kStride = 5;
  static const std::thread::id caller = std::this_thread::get_id();
  is_watched = [] { return std::this_thread::get_id() == caller; };
  const Side side(true, "hgca"), twin(false, "hgca");
  attend_twins(side, twin, kPrompt, 1);
  Call call(kLong, 2);
  call.to_device();
  const tandem_attend_args args = call.args(side);
  int64_t n_failed = 0;
  for (int32_t status = TANDEM_ERROR_OUT_OF_MEMORY; status != TANDEM_OK; n_failed += status != TANDEM_OK) {
    n_news = 0;
    fails_at = 1 + kStride * n_failed;
    for_ever = armed = true;
    status = tandem_attend(side.session, &args, nullptr);
    for_ever = armed = false;
    if (status == TANDEM_OK) break;
    assert_int_equal(status, TANDEM_ERROR_OUT_OF_MEMORY);
    assert_int_equal(side.length(), kPrompt);
  }
  is_watched = nullptr;
  print_message("%lld lacks\n", static_cast<long long>(n_failed));
  assert_true(n_failed > 3);
  Call on_host(kLong, 2);
  attend(twin, on_host);
  assert_close(call.output(), on_host.output());
  attend_twins(side, twin, 1, 3);
}

// Costs are learned on the thread that meets the device, which has no way to report an error.
void test_costs_without_memory(void**) {
  tandem::Profile costs;
  const tandem::Layer layer;
  n_news = 0;
  fails_at = 1;
  for_ever = armed = true;
  costs.note_host(layer, 1, 100, 1000.0);
  costs.note_joint(layer, {1, 100, 1000.0, 100, 1000.0});
  for_ever = armed = false;
  assert_true(n_news > 0);
  assert_true(costs.host_ns(layer, 1, 100) == 0.0);
  costs.note_host(layer, 1, 100, 1000.0);
  costs.note_joint(layer, {1, 100, 1000.0, 100, 1000.0});
  assert_true(costs.host_ns(layer, 1, 100) == 1000.0);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_same_answers),
      cmocka_unit_test(test_nothing_stays_behind),
      cmocka_unit_test(test_memory_of_its_own),
      cmocka_unit_test_setup_teardown(test_release_takes_back, open_stand_in, close_stand_in),
      cmocka_unit_test_setup_teardown(test_appends_take_back, open_stand_in, close_stand_in),
      cmocka_unit_test(test_costs_without_memory),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
