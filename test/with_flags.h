// SPDX-License-Identifier: MIT
// A command line with other flags: programs take no flag twice.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

// Flags of `changes` replace those of the command, with their values; the others follow at its end.
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
