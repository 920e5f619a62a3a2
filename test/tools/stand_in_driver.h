// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

// Delay of each stream operation under TANDEM_TEST_DRIVER=delay.
inline constexpr int64_t kDelayNs = 3'000'000;
