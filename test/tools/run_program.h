// SPDX-License-Identifier: MIT
// Runs a program and returns its output. Also ends a test with a message.
#pragma once

#include <string>
#include <vector>

struct ProgramRun {
  int exit_code = -1;  // -1: killed by a signal, or never started
  std::string out, err;
};

// arguments[0] is the path. environment: "NAME=value" strings added to the current environment.
ProgramRun run_program(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {});

// Prints the message and fails the cmocka test that is running.
[[gnu::format(printf, 1, 2)]] void fail_test(const char* format, ...);
