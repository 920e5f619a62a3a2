// SPDX-License-Identifier: MIT
// Foreign text in the library's JSON reports.
#pragma once

#include <string>
#include <string_view>

namespace tandem {

// Returns the text as a JSON string, quotes included. Bytes that are not UTF-8, as in some paths, become U+FFFD.
std::string json_string(std::string_view text);

}  // namespace tandem
