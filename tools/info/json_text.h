// SPDX-License-Identifier: MIT
// Formats JSON for people: names to the left, values to the right, one line for each element of a list of objects.
#pragma once

#include <string>

#include "tools/common/engine_report.h"

namespace tools {

std::string json_text(const Json& json, int indent = 0);

}  // namespace tools
