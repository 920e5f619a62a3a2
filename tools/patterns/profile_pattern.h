// SPDX-License-Identifier: MIT
// A pattern of a profile: how a command line writes it, and the name that its rows have.
#pragma once

#include <string>
#include <vector>

#include "tandem/tandem.h"

namespace tools {

// "a_shape=100/800", "vertical_slash=30/800", "block_sparse=100", "full"; several with "+" are united. False: the text is
// none of these.
bool parse_pattern(const std::string& words, tandem_head_pattern* pattern);

// "a_shape 100/800", "full", "a_shape 4/1020 + block_sparse 100". Equal patterns have equal names, others have other names.
std::string profile_name(const tandem_head_pattern& pattern);

// Adds the pattern unless one of that name is there. A pattern without kinds is FULL.
void add_distinct(std::vector<tandem_head_pattern>* patterns, tandem_head_pattern pattern);

}  // namespace tools
