// SPDX-License-Identifier: MIT
// The pattern of a profile: its form on a command line and its name in rows.
#pragma once

#include <string>
#include <vector>

#include "tandem/tandem.h"

namespace tools {

// Parses "a_shape=100/800", "vertical_slash=30/800", "block_sparse=100" or "full". Patterns joined by "+" are united.
// Returns false for any other text.
bool parse_pattern(const std::string& words, tandem_head_pattern* pattern);

// Returns "a_shape 100/800", "full", "a_shape 4/1020 + block_sparse 100". Two patterns have the same name only if they are
// equal.
std::string profile_name(const tandem_head_pattern& pattern);

// Adds the pattern unless the list has one of that name. A pattern without kinds is FULL.
void add_distinct(std::vector<tandem_head_pattern>* patterns, tandem_head_pattern pattern);

}  // namespace tools
