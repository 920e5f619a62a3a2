// SPDX-License-Identifier: MIT
// Head patterns in JSON, as MInference publishes them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/base/status.h"

namespace tandem {

// heads: layer by layer; every layer has as many. Errors name layer and head, both counted from 0, or line and column of
// text that is not JSON.
Status parse_pattern_json(const std::string& text, std::vector<tandem_head_pattern>* heads, int64_t* n_layers);

}  // namespace tandem
