// SPDX-License-Identifier: MIT
// Head patterns as people read them, as JSON, and as a picture: layers down, heads across.
#pragma once

#include <string>

#include "tools/common/engine_report.h"
#include "tools/patterns/pattern_heads.h"

namespace tools {

// "kinds", and the sizes of these by the names of tandem_head_pattern.
Json head_json(const tandem_head_pattern& head);
// A table by layer, and a picture of one letter a head.
std::string patterns_text(const PatternHeads& heads);
Json patterns_json(const PatternHeads& heads);
std::string patterns_svg(const PatternHeads& heads);

}  // namespace tools
