// SPDX-License-Identifier: MIT
#ifndef EXAMPLES_GENERATE_JSON_TEXT_H_
#define EXAMPLES_GENERATE_JSON_TEXT_H_

#include <nlohmann/json.hpp>
#include <string>

namespace generate {

// Cuts a text for a message to 60 bytes, between two characters.
inline std::string brief_text(const std::string& text) {
  constexpr size_t kMaxBytes = 60;
  if (text.size() <= kMaxBytes) return text;
  size_t end = kMaxBytes;
  while (end > 0 && (text[end] & 0xc0) == 0x80) --end;  // later bytes of a UTF-8 character
  return text.substr(0, end) + "…";
}

// Returns a JSON value for a message: short, and without recursion, because a hostile file can nest deeper than the stack.
inline std::string brief(const nlohmann::json& json) {
  if (json.is_object()) return "{...}";
  if (json.is_array()) {
    std::string out;
    for (size_t i = 0; i < json.size() && out.size() <= 60; ++i)
      out += (i ? ", " : "") + (json[i].is_structured() ? std::string("...") : brief(json[i]));
    return "[" + brief_text(out) + "]";
  }
  return brief_text(json.dump());
}

}  // namespace generate

#endif  // EXAMPLES_GENERATE_JSON_TEXT_H_
