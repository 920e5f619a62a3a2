// SPDX-License-Identifier: MIT
#include "program.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "interrupt.h"

namespace generate {

namespace {

// oneDNN's OpenMP threads spin after each product, on cores that Tandem's workers need next. Only an environment variable
// changes that, and only before the program starts. So the program sets the variable and starts itself again.
void start_with_sleeping_openmp(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  if (setenv("OMP_WAIT_POLICY", "passive", 1) == 0) execv("/proc/self/exe", argv);
}

}  // namespace

int run_program(const char* name, int argc, char** argv, Failure (*run)(int argc, char** argv)) {
  start_with_sleeping_openmp(argv);  // without it everything works, only slower
  Failure failure;
  try {
    failure = run(argc, argv);
  } catch (const std::exception& exception) {
    failure.message = exception.what();
  }
  if (!failure && (std::fflush(stdout) != 0 || std::ferror(stdout))) failure.message = "stdout: cannot be written";
  if (!failure) return 0;
  // The message may contain names from files. Control characters are replaced, so that it stays one line and cannot control
  // the terminal.
  for (char& c : failure.message)
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
  if (failure.is_interruption && isatty(STDOUT_FILENO)) std::putchar('\n');  // after half a row, and ^C
  std::fflush(stdout);
  std::fprintf(stderr, "%s: %s\n", name, failure.message.c_str());
  if (failure.is_interruption) return interrupt_exit_code();
  return failure.is_usage ? 2 : 1;
}

}  // namespace generate
