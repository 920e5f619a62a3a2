// SPDX-License-Identifier: MIT
// What main() of every tool does.
#pragma once

#include "tools/common/result.h"

namespace tools {

// good: what was asked for was done, and its answer is no "no" (a wrong output, a plan over its cap).
using ToolFn = Result (*)(int argc, const char* const* argv, bool* good);

// The exit code: 0; 1 when the answer is "no", or for a failure; 2 for a wrong command line; 130 for Ctrl-C. A line on
// stderr tells the last three. Exceptions (no memory) and a stdout that cannot be written are failures.
int run_tool(const char* name, int argc, const char* const* argv, ToolFn run);

// Flushes stdout: what has been printed so far has arrived, or nobody can read it.
Result flush_stdout();

}  // namespace tools
