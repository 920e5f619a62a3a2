// SPDX-License-Identifier: MIT
#include "tools/common/text_table.h"

#include <algorithm>

namespace tools {

std::string TextTable::markdown() const {
  std::vector<size_t> width(header.size(), 3);
  for (size_t c = 0; c < header.size(); ++c) {
    width[c] = std::max(width[c], header[c].size());
    for (const auto& row : rows) width[c] = std::max(width[c], row[c].size());
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string out = "|";
    for (size_t c = 0; c < cells.size(); ++c) {
      const size_t padding = width[c] - cells[c].size();
      out.append(right_aligned[c] ? padding + 1 : 1, ' ');
      out += cells[c];
      out.append(right_aligned[c] ? 1 : padding + 1, ' ');
      out += '|';
    }
    return out + "\n";
  };
  std::string out = line(header) + "|";
  for (size_t c = 0; c < header.size(); ++c)
    out += right_aligned[c] ? std::string(width[c] + 1, '-') + ":|" : std::string(width[c] + 2, '-') + "|";
  out += "\n";
  for (const auto& row : rows) out += line(row);
  return out;
}

}  // namespace tools
