// SPDX-License-Identifier: MIT
// Tables for people: columns aligned, numbers to the right. The Markdown form is also readable as it is.
#pragma once

#include <string>
#include <vector>

namespace tools {

// A table whose rows are printed as they come. The columns are as wide as the widest cell that is expected; a wider one
// makes its own row longer.
class RowTable {
 public:
  RowTable() = default;
  RowTable(std::vector<std::string> header, std::vector<bool> right_aligned, const std::vector<size_t>& least_widths);
  std::string head() const;
  std::string row(const std::vector<std::string>& cells) const;

 private:
  std::vector<std::string> header_;
  std::vector<bool> right_aligned_;
  std::vector<size_t> widths_;
};

struct TextTable {
  std::vector<std::string> header;
  std::vector<bool> right_aligned;             // per column
  std::vector<std::vector<std::string>> rows;  // each as long as header

  std::string markdown() const;
};

}  // namespace tools
