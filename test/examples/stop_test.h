// SPDX-License-Identifier: MIT
#pragma once

#include "with_cmocka.h"

// Ends the test with a message: what fail_msg() does, which with_cmocka.h takes away with fail().
#define STOP_TEST(...)         \
  do {                         \
    print_error(__VA_ARGS__);  \
    print_error("\n");         \
    _fail(__FILE__, __LINE__); \
  } while (false)
