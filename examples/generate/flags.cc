// SPDX-License-Identifier: MIT
#include "flags.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <string_view>
#include <system_error>

#include "nearest_name.h"

namespace generate {
namespace {

std::string quoted(std::string_view value) { return std::string("\"").append(value).append("\""); }

enum class Parsed { kNumber, kTooLarge, kNoNumber };

// Without a locale: "1.5" is a number everywhere.
template <typename Number>
Parsed parse_number(std::string_view text, Number* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  if (error == std::errc::invalid_argument || end != text.data() + text.size()) return Parsed::kNoNumber;
  return error == std::errc() ? Parsed::kNumber : Parsed::kTooLarge;
}

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

Failure parse_real(const std::string& flag, std::string_view text, double low, double high, double* value) {
  double parsed = 0;
  const Parsed kind = parse_number(text, &parsed);
  if (kind == Parsed::kNoNumber || !std::isfinite(parsed)) return {flag + ": " + quoted(text) + " is not a number"};
  if (kind == Parsed::kTooLarge || parsed < low || parsed > high)
    return {flag + ": " + quoted(text) + " is not between " + short_number(low) + " and " + short_number(high)};
  *value = parsed;
  return {};
}

}  // namespace

void Flags::text(const char* name, const char* value_name, const char* help, std::string* value) {
  const std::string flag = name;
  flags_.push_back({name, value_name, help, [=](std::string_view given) -> Failure {
                      if (given.empty()) return {flag + ": \"\" is empty"};
                      *value = given;
                      return {};
                    }});
}

void Flags::integer(const char* name, const char* help, int64_t low, int64_t high, int64_t* value) {
  const std::string flag = name;
  flags_.push_back({name, "N", help, [=](std::string_view given) -> Failure {
                      int64_t parsed = 0;
                      const Parsed kind = parse_number(given, &parsed);
                      if (kind == Parsed::kNoNumber) return {flag + ": " + quoted(given) + " is not a whole number"};
                      if (kind == Parsed::kTooLarge || parsed < low || parsed > high)
                        return {flag + ": " + quoted(given) + " is not between " + std::to_string(low) + " and " +
                                std::to_string(high)};
                      *value = parsed;
                      return {};
                    }});
}

void Flags::real(const char* name, const char* help, double low, double high, double* value) {
  const std::string flag = name;
  flags_.push_back({name, "X", help, [=](std::string_view given) { return parse_real(flag, given, low, high, value); }});
}

void Flags::choice(const char* name, const char* help, std::vector<std::string> words, int32_t* value, int32_t first) {
  const std::string flag = name;
  std::string value_name;
  for (const std::string& word : words) value_name += (value_name.empty() ? "" : "|") + word;
  flags_.push_back({name, value_name, help, [=](std::string_view given) -> Failure {
                      for (size_t i = 0; i < words.size(); ++i) {
                        if (words[i] == given) {
                          *value = first + static_cast<int32_t>(i);
                          return {};
                        }
                      }
                      return {flag + ": " + quoted(given) + " is none of " + value_name};
                    }});
}

void Flags::toggle(const char* name, const char* help, bool* value) {
  flags_.push_back({name, "", help, [=](std::string_view) -> Failure {
                      *value = true;
                      return {};
                    }});
}

void Flags::reals(const char* name, const char* help, double low, double high, std::vector<double>* values) {
  const std::string flag = name;
  flags_.push_back({name, "X,X,...", help, [=](std::string_view given) -> Failure {
                      std::vector<double> parsed;
                      for (size_t first = 0; first <= given.size();) {
                        const size_t comma = std::min(given.find(',', first), given.size());
                        parsed.push_back(0);
                        GENERATE_TRY(parse_real(flag, given.substr(first, comma - first), low, high, &parsed.back()));
                        first = comma + 1;
                      }
                      *values = std::move(parsed);
                      return {};
                    }});
}

const Flags::Flag* Flags::find(std::string_view name) const {
  for (const Flag& flag : flags_)
    if (flag.name == name) return &flag;
  return nullptr;
}

Failure Flags::parse(int argc, char** argv, bool* help_wanted) { return as_usage(parse_all(argc, argv, help_wanted)); }

Failure Flags::parse_all(int argc, char** argv, bool* help_wanted) {
  *help_wanted = false;
  for (int i = 1; i < argc; ++i)
    if (std::string_view(argv[i]) == "--help" || std::string_view(argv[i]) == "-h") *help_wanted = true;
  if (*help_wanted) return {};
  for (int i = 1; i < argc; ++i) {
    std::string_view name = argv[i], value;
    const size_t equals = name.find('=');
    const bool attached = name.substr(0, 2) == "--" && equals != std::string_view::npos;
    if (attached) {
      value = name.substr(equals + 1);
      name = name.substr(0, equals);
    }
    const Flag* flag = find(name);
    if (flag == nullptr) {
      std::vector<std::string> names;
      for (const Flag& known : flags_) names.push_back(known.name);
      return {std::string(name) + ": unknown flag" + did_you_mean(name, names) + "; --help lists them"};
    }
    if (flag->value_name.empty()) {
      if (attached) return {flag->name + ": takes no value, got " + quoted(value)};
    } else if (!attached) {
      if (++i == argc) return {flag->name + ": its value is missing"};
      value = argv[i];
    }
    GENERATE_TRY(flag->take(value));
    given_.insert(flag->name);
  }
  return {};
}

Failure Flags::refuse_given(std::initializer_list<const char*> names, const std::string& why) const {
  for (const char* name : names)
    if (given(name)) return as_usage({std::string(name) + ": " + why});
  return {};
}

std::string Flags::help() const {
  constexpr size_t kColumn = 34;
  std::string out = usage_ + "\n\n";
  for (const Flag& flag : flags_) {
    std::string line = "  " + flag.name + (flag.value_name.empty() ? "" : " " + flag.value_name);
    line += line.size() + 2 > kColumn ? "\n" + std::string(kColumn, ' ') : std::string(kColumn - line.size(), ' ');
    for (const char c : flag.help) line += c == '\n' ? "\n" + std::string(kColumn, ' ') : std::string(1, c);
    out += line + "\n";
  }
  return out + "  --help" + std::string(kColumn - 8, ' ') + "this text\n";
}

}  // namespace generate
