// SPDX-License-Identifier: MIT
#pragma once

#include <string>
#include <vector>

struct CommandResult {
  int exit_code = -1;  // -1: a signal ended the program, or it could not be started
  std::string out, err;
};

// Runs a program and waits for its end.
CommandResult run_command(const std::vector<std::string>& args);
