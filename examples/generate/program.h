// SPDX-License-Identifier: MIT
#ifndef EXAMPLES_GENERATE_PROGRAM_H_
#define EXAMPLES_GENERATE_PROGRAM_H_

#include "failure.h"

namespace generate {

// Exit code 0, or after one line on stderr 2 for a usage failure, 130 for Ctrl-C and 1 for any other. Exceptions (no memory,
// oneDNN) are failures too.
int run_program(const char* name, int argc, char** argv, Failure (*run)(int argc, char** argv));

}  // namespace generate

#endif  // EXAMPLES_GENERATE_PROGRAM_H_
