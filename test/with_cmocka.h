// SPDX-License-Identifier: MIT
// Includes cmocka in C++. Include it last: cmocka needs these headers before it, not every version has extern "C", and its
// macro fail() would hide functions of that name.
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

extern "C" {
#include <cmocka.h>
}
#undef fail
#undef fail_msg
#define fail_msg(...) (print_error(__VA_ARGS__), print_error("\n"), _fail(__FILE__, __LINE__))

// Returns TANDEM_TEST_FILTER, which limits every program to the test of that name (* and ? are wild cards).
inline const char* test_filter() {
  const char* name = getenv("TANDEM_TEST_FILTER");
  return name != nullptr && *name != '\0' ? name : nullptr;
}
#undef cmocka_run_group_tests
#define cmocka_run_group_tests(tests, setup, teardown) \
  (cmocka_set_test_filter(test_filter()),              \
   _cmocka_run_group_tests(#tests, tests, sizeof(tests) / sizeof((tests)[0]), setup, teardown))
