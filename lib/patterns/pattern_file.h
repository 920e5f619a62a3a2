// SPDX-License-Identifier: MIT
// Reads files of head patterns in the formats of MInference and DuoAttention. tandem/patterns.h describes their contents.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/base/status.h"

namespace tandem {

struct PatternFile {
  std::vector<tandem_head_pattern> heads;  // layer by layer, equally many per layer
  int64_t n_layers = 0;
};

Status check_pattern_file_options(const tandem_pattern_file_options& options);

// Parses the text of a file. Errors name the line, or layer and head, but not the path. options: checked.
Status parse_patterns(const std::string& text, const tandem_pattern_file_options& options, PatternFile* file);

Status read_pattern_file(const char* path, const tandem_pattern_file_options& options, PatternFile* file);

}  // namespace tandem
