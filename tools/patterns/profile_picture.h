// SPDX-License-Identifier: MIT
// Draws a profile as a picture: time upwards and length to the right, both logarithmic, a line for each pattern.
#pragma once

#include <string>
#include <vector>

#include "tools/patterns/profile_file.h"

namespace tools {

// Draws these patterns of the profile. The colors follow the page's mode, light or dark.
std::string profile_svg(const Profile& profile, const std::vector<std::string>& patterns);

}  // namespace tools
