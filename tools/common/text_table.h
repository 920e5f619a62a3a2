// SPDX-License-Identifier: MIT
// Tables for people: aligned columns, with numbers to the right. The Markdown form is also readable as it is.
#pragma once

#include <string>
#include <vector>

namespace tools {

// A table that prints its rows one by one. Columns are as wide as the widest expected cell. A wider cell makes its own row
// longer.
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
