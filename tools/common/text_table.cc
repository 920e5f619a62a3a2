// SPDX-License-Identifier: MIT
#include "tools/common/text_table.h"

#include <algorithm>
#include <utility>

namespace tools {

RowTable::RowTable(std::vector<std::string> header, std::vector<bool> right_aligned, const std::vector<size_t>& least_widths)
    : header_(std::move(header)), right_aligned_(std::move(right_aligned)) {
  for (size_t c = 0; c < header_.size(); ++c)
    widths_.push_back(std::max({size_t{3}, header_[c].size(), c < least_widths.size() ? least_widths[c] : 0}));
}

std::string RowTable::head() const {
  std::string out = row(header_) + "|";
  for (size_t c = 0; c < header_.size(); ++c)
    out += right_aligned_[c] ? std::string(widths_[c] + 1, '-') + ":|" : std::string(widths_[c] + 2, '-') + "|";
  return out + "\n";
}

std::string RowTable::row(const std::vector<std::string>& cells) const {
  std::string out = "|";
  for (size_t c = 0; c < cells.size(); ++c) {
    const size_t padding = widths_[c] - std::min(widths_[c], cells[c].size());
    out.append(right_aligned_[c] ? padding + 1 : 1, ' ');
    out += cells[c];
    out.append(right_aligned_[c] ? 1 : padding + 1, ' ');
    out += '|';
  }
  return out + "\n";
}

std::string TextTable::markdown() const {
  std::vector<size_t> widths(header.size(), 0);
  for (const auto& row : rows)
    for (size_t c = 0; c < header.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  const RowTable table(header, right_aligned, widths);
  std::string out = table.head();
  for (const auto& row : rows) out += table.row(row);
  return out;
}

}  // namespace tools
