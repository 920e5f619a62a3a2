// SPDX-License-Identifier: MIT
// cmocka in C++, included last: it needs these headers before it, has no extern "C" of its own in every version, and its
// macro fail() would hide functions of that name.
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

extern "C" {
#include <cmocka.h>
}
#undef fail
