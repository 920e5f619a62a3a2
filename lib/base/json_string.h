// SPDX-License-Identifier: MIT
// Text that is not the library's own, in its JSON reports.
#pragma once

#include <string>
#include <string_view>

namespace tandem {

// With the quotes. Bytes that are not UTF-8, which paths may have, become U+FFFD.
std::string json_string(std::string_view text);

}  // namespace tandem
