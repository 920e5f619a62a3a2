// SPDX-License-Identifier: MIT
// Formats results as one JSON object per line, as CSV, or as rows of a Markdown table, each result as soon as it is
// measured.
#pragma once

#include <string>
#include <vector>

#include "tools/bench/measure.h"
#include "tools/common/text_table.h"

namespace tools {

std::string json_line(const Bench& bench, const Measurement& measurement);
std::string csv_header(const BenchOptions& options);
std::string csv_line(const Bench& bench, const Measurement& measurement);

class MarkdownRows {
 public:
  explicit MarkdownRows(const Bench& bench);
  // Returns a row. The first one comes with the title and the head of the table.
  std::string add(const Measurement& measurement);

 private:
  const Bench& bench_;
  RowTable table_;
  bool has_head_ = false;
  size_t type_width_ = 0, keys_width_ = 0;
};

}  // namespace tools
