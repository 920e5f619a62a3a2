// SPDX-License-Identifier: MIT
#include "tools/run_program.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>

#include "with_cmocka.h"

namespace {

std::string contents(FILE* file) {
  std::string text;
  char piece[4096];
  std::rewind(file);
  for (size_t n; (n = std::fread(piece, 1, sizeof piece, file)) > 0;) text.append(piece, n);
  std::fclose(file);
  return text;
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

}  // namespace

ProgramRun run_program(const std::vector<std::string>& arguments, const std::vector<std::string>& environment) {
  FILE* out = std::tmpfile();
  FILE* err = std::tmpfile();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fileno(out), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, fileno(err), STDERR_FILENO);
  std::vector<std::string> all = environment;
  for (char** variable = environ; *variable; ++variable) all.emplace_back(*variable);

  ProgramRun run;
  pid_t child = 0;
  int status = 0;
  if (posix_spawn(&child, arguments[0].c_str(), &actions, nullptr, pointers(arguments).data(), pointers(all).data()) == 0 &&
      waitpid(child, &status, 0) == child && WIFEXITED(status))
    run.exit_code = WEXITSTATUS(status);
  posix_spawn_file_actions_destroy(&actions);
  run.out = contents(out);
  run.err = contents(err);
  return run;
}

void fail_test(const char* format, ...) {
  char message[4096];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  print_error("%s\n", message);
  assert_true(false);
}
