// SPDX-License-Identifier: MIT
// `tandem patterns search`. The search is a program of Tandem's Python package, because it runs the model in Transformers.
#pragma once

#include "tools/common/result.h"

namespace tools {

// Replaces this process by `python3 -m tandem.patterns` with argv[1 .. argc), whose exit code becomes this program's.
// Returns only on failure.
Result run_pattern_search(int argc, const char* const* argv);

}  // namespace tools
