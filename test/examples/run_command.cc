// SPDX-License-Identifier: MIT
#include "run_command.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <memory>

namespace {

using File = std::unique_ptr<FILE, int (*)(FILE*)>;

std::string contents(FILE* file) {
  std::string text;
  char piece[4096];
  std::rewind(file);
  while (const size_t n = std::fread(piece, 1, sizeof piece, file)) text.append(piece, n);
  return text;
}

}  // namespace

CommandResult run_command(const std::vector<std::string>& args) {
  CommandResult result;
  const File out(std::tmpfile(), &std::fclose), err(std::tmpfile(), &std::fclose);
  std::vector<char*> argv;
  for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  if (!out || !err) return result;
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    dup2(fileno(out.get()), STDOUT_FILENO);
    dup2(fileno(err.get()), STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return result;
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  result.out = contents(out.get());
  result.err = contents(err.get());
  return result;
}
