// SPDX-License-Identifier: MIT
#include "tools/info/json_text.h"

#include <algorithm>

namespace tools {
namespace {

std::string scalar_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_null()) return "-";
  return value.dump();
}

// Formats a value on one line: "worker 0, cpu 3, bound yes".
std::string line_text(const Json& value) {
  if (!value.is_structured()) return scalar_text(value);
  std::string line;
  for (const auto& [name, member] : value.items()) {
    line += line.empty() ? "" : ", ";
    line += value.is_object() ? name + " " + line_text(member) : line_text(member);
  }
  return line.empty() ? "none" : line;
}

bool has_objects(const Json& value) {
  return std::any_of(value.begin(), value.end(), [](const Json& member) { return member.is_object(); });
}

}  // namespace

std::string json_text(const Json& json, int indent) {
  size_t width = 0;
  for (const auto& [name, member] : json.items())
    if (!member.is_structured()) width = std::max(width, name.size());
  std::string out;
  for (const auto& [name, member] : json.items()) {
    if (member.is_object()) {
      out += text("%*s%s\n", indent, "", name.c_str()) + json_text(member, indent + 2);
    } else if (member.is_array() && has_objects(member)) {
      out += text("%*s%s\n", indent, "", name.c_str());
      for (const Json& element : member) out += text("%*s%s\n", indent + 2, "", line_text(element).c_str());
    } else {
      out += text("%*s%-*s  %s\n", indent, "", static_cast<int>(width), name.c_str(), line_text(member).c_str());
    }
  }
  return out;
}

}  // namespace tools
