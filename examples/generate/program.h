// SPDX-License-Identifier: MIT
#ifndef EXAMPLES_GENERATE_PROGRAM_H_
#define EXAMPLES_GENERATE_PROGRAM_H_

#include "failure.h"

namespace generate {

// Runs a program. Returns exit code 0, or prints one line on stderr and returns 2 for a usage failure, 130 for Ctrl-C, 143
// for SIGTERM and 1 for other failures. Exceptions (no memory, oneDNN) count as failures.
int run_program(const char* name, int argc, char** argv, Failure (*run)(int argc, char** argv));

}  // namespace generate

#endif  // EXAMPLES_GENERATE_PROGRAM_H_
