// SPDX-License-Identifier: MIT
// The common part of every tool's main().
#pragma once

#include "tools/common/result.h"

namespace tools {

// *good: the work is done and its answer is not "no" (a wrong output, a plan over its cap).
using ToolFn = Result (*)(int argc, const char* const* argv, bool* good);

// Runs a tool and returns its exit code: 0; 1 if the answer is "no" or for a failure; 2 for a wrong command line; 130 for
// Ctrl-C. Failures, wrong command lines and Ctrl-C print a line on stderr. Exceptions (no memory) and a stdout that cannot
// be written are failures.
int run_tool(const char* name, int argc, const char* const* argv, ToolFn run);

// Flushes stdout. Succeeds only if all output so far could be written.
Result flush_stdout();

}  // namespace tools
