// SPDX-License-Identifier: MIT
#ifndef EXAMPLES_GENERATE_PROGRAM_H_
#define EXAMPLES_GENERATE_PROGRAM_H_

#include "failure.h"

namespace generate {

// Exit code 0, or 1 after one line on stderr. What throws here (no memory, oneDNN) ends in such a line as well.
int run_program(const char* name, int argc, char** argv, Failure (*run)(int argc, char** argv));

}  // namespace generate

#endif  // EXAMPLES_GENERATE_PROGRAM_H_
