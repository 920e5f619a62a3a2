// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

// Of an operation of a stream, with TANDEM_TEST_DRIVER=delay.
inline constexpr int64_t kDelayNs = 3'000'000;
