// SPDX-License-Identifier: MIT
#pragma once

#include "with_cmocka.h"

// Ends the test with a message, like fail_msg(). with_cmocka.h removes fail_msg() together with fail().
#define STOP_TEST(...)         \
  do {                         \
    print_error(__VA_ARGS__);  \
    print_error("\n");         \
    _fail(__FILE__, __LINE__); \
  } while (false)
