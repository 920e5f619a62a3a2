// SPDX-License-Identifier: MIT
// operator new fails: the N-th time on any thread, once or from then on, for every N over a small scenario.
#include "api_scenario.h"
#include "failing_new.h"

using namespace tandem_test;
using namespace failing_new;

namespace {

const Failures kFailures = {[] { armed.store(true); },
                            [] {
                              armed.store(false);
                              if (n_news.load() >= fails_at.load()) fails_at.store(0);  // the failure has happened
                            }};

void run_all(bool keeps_failing) {
  const tandem_engine_options options = small_engine_options();
  fails_at.store(0);
  for_ever.store(keeps_failing);
  Scenario reference(options, false);
  assert_int_equal(reference.run({[] {}, [] {}}), 0);
  int n_runs = 0, n_failing_runs = 0;
  for (int64_t n = 1;; ++n, ++n_runs) {
    Scenario scenario(options, false);
    n_news.store(0);
    fails_at.store(n);
    n_failing_runs += scenario.run(kFailures) > 0;
    expect_same_answers(reference, scenario);
    if (fails_at.load() != 0) break;
  }
  print_message("%d allocations failed one by one, %d of them refused a call\n", n_runs, n_failing_runs);
  assert_true(n_runs > 100);
  assert_true(n_failing_runs > 50);
}

void test_fails_once(void**) { run_all(false); }
void test_fails_from_then_on(void**) { run_all(true); }

// Passes bad arguments while no memory is available. Each call must return a status and a constant error object.
void test_no_memory_for_the_error(void**) {
  for_ever.store(true);
  n_news.store(0);
  fails_at.store(1);
  armed.store(true);
  tandem_error *first = nullptr, *second = nullptr;
  const int32_t status = tandem_sequence_drop(nullptr, 1, &first);
  const int32_t silent = tandem_sequence_drop(nullptr, 1, nullptr);
  tandem_sequence_drop(nullptr, 1, &second);
  armed.store(false);
  assert_int_equal(status, TANDEM_ERROR_OUT_OF_MEMORY);
  assert_int_equal(silent, TANDEM_ERROR_OUT_OF_MEMORY);
  assert_non_null(first);
  assert_ptr_equal(first, second);
  assert_int_equal(tandem_error_status(first), status);
  assert_string_equal(tandem_error_field(first), "");
  assert_non_null(std::strstr(tandem_error_message(first), "OUT_OF_MEMORY"));
  for (int i = 0; i < 3; ++i) tandem_error_release(first);
  assert_int_equal(tandem_error_status(second), status);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_no_memory_for_the_error),
      cmocka_unit_test(test_fails_once),
      cmocka_unit_test(test_fails_from_then_on),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
