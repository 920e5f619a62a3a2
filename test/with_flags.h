// SPDX-License-Identifier: MIT
// A command line with changed flags. Programs refuse a repeated flag.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

// Replaces flags of the command by those of `changes`, with their values. Appends the flags that the command does not have.
inline std::vector<std::string> with_flags(std::vector<std::string> command, const std::vector<std::string>& changes) {
  const auto is_flag = [](const std::string& word) { return word.rfind("--", 0) == 0; };
  for (const std::string& word : changes) {
    const auto at = is_flag(word) ? std::find(command.begin(), command.end(), word) : command.end();
    if (at == command.end()) continue;
    const bool has_value = at + 1 != command.end() && !is_flag(at[1]);
    command.erase(at, at + (has_value ? 2 : 1));
  }
  command.insert(command.end(), changes.begin(), changes.end());
  return command;
}
