// SPDX-License-Identifier: MIT
// Head patterns in MInference's JSON format.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/base/status.h"

namespace tandem {

// heads: layer by layer, equally many per layer. Errors name layer and head, both counted from 0. For text that is not JSON
// they name line and column.
Status parse_pattern_json(const std::string& text, std::vector<tandem_head_pattern>* heads, int64_t* n_layers);

}  // namespace tandem
