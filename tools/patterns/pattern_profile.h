// SPDX-License-Identifier: MIT
// `tandem patterns profile`: measures the time of an append by pattern and length, or reads such a profile.
#pragma once

#include "tools/common/result.h"

namespace tools {

// argv[1] is "profile".
Result run_pattern_profile(int argc, const char* const* argv);

}  // namespace tools
