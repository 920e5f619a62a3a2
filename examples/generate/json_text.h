// SPDX-License-Identifier: MIT
#ifndef EXAMPLES_GENERATE_JSON_TEXT_H_
#define EXAMPLES_GENERATE_JSON_TEXT_H_

#include <nlohmann/json.hpp>
#include <string>

namespace generate {

// A JSON value for a message: short, and without descending into it (dump() recurses, and a hostile file can nest deeper
// than the stack).
inline std::string brief(const nlohmann::json& json) {
  constexpr size_t kMaxChars = 60;
  if (json.is_object()) return "{...}";
  if (json.is_array()) {
    std::string out = "[";
    for (size_t i = 0; i < json.size() && out.size() < kMaxChars; ++i)
      out += (i ? ", " : "") + (json[i].is_structured() ? std::string("...") : brief(json[i]));
    return out + "]";
  }
  const std::string text = json.dump();
  return text.size() <= kMaxChars ? text : text.substr(0, kMaxChars) + "...";
}

}  // namespace generate

#endif  // EXAMPLES_GENERATE_JSON_TEXT_H_
