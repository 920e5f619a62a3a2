// SPDX-License-Identifier: MIT
// Results as one JSON object per line, as CSV, or as a Markdown table.
#pragma once

#include <string>
#include <vector>

#include "tools/bench/measure.h"

namespace tools {

std::string json_line(const Bench& bench, const Measurement& measurement);
std::string csv_header(const BenchOptions& options);
std::string csv_line(const Bench& bench, const Measurement& measurement);
std::string markdown(const Bench& bench, const std::vector<Measurement>& measurements);

}  // namespace tools
