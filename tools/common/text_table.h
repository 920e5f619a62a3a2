// SPDX-License-Identifier: MIT
// Tables for people: columns aligned, numbers to the right. The Markdown form is also readable as it is.
#pragma once

#include <string>
#include <vector>

namespace tools {

struct TextTable {
  std::vector<std::string> header;
  std::vector<bool> right_aligned;             // per column
  std::vector<std::vector<std::string>> rows;  // each as long as header

  std::string markdown() const;
};

}  // namespace tools
