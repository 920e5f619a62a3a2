// SPDX-License-Identifier: MIT
// An engine with a device: answers are those without, and whichever allocation its creation lacks, a device that was opened
// is closed.
#include "api/api_scenario.h"
#include "device/stand_in_host.h"
#include "failing_new.h"

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
  Scenario reference(small_engine_options(), false), scenario(device_options(), false);
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

// What stands for the device is not the program's, whose every allocation may fail.
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

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_same_answers),
      cmocka_unit_test(test_nothing_stays_behind),
      cmocka_unit_test(test_memory_of_its_own),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
