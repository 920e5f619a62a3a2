// SPDX-License-Identifier: MIT
// Shows head patterns as text, as JSON, and as a picture: layers down, heads across.
#pragma once

#include <string>

#include "tools/common/engine_report.h"
#include "tools/patterns/pattern_heads.h"

namespace tools {

// Returns "kinds" and the sizes of these kinds, named as in tandem_head_pattern.
Json head_json(const tandem_head_pattern& head);
// Returns a table by layer and a picture with one letter a head.
std::string patterns_text(const PatternHeads& heads);
Json patterns_json(const PatternHeads& heads);
std::string patterns_svg(const PatternHeads& heads);

}  // namespace tools
