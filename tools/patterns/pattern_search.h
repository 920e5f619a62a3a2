// SPDX-License-Identifier: MIT
// `tandem patterns search`: the search itself is a program of Tandem's Python package, as it runs the model in Transformers.
#pragma once

#include "tools/common/result.h"

namespace tools {

// Becomes `python3 -m tandem.patterns` with argv[1 .. argc), whose exit code is then this program's. Returns only where that
// cannot be.
Result run_pattern_search(int argc, const char* const* argv);

}  // namespace tools
