// SPDX-License-Identifier: MIT
#include "flags.h"

#include <algorithm>
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

// Parses without a locale, so that "1.5" is a number everywhere.
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

std::string joined(const std::vector<std::string>& words, const char* separator) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : separator) + word;
  return out;
}

}  // namespace

Failure none_of(const std::string& flag, std::string_view given, const std::vector<std::string>& words) {
  return {flag + ": " + quoted(given) + " is none of " + joined(words, ", ") + did_you_mean(given, words)};
}

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
  flags_.push_back({name, joined(words, "|"), help, [=](std::string_view given) -> Failure {
                      const auto word = std::find(words.begin(), words.end(), given);
                      if (word == words.end()) return none_of(flag, given, words);
                      *value = first + static_cast<int32_t>(word - words.begin());
                      return {};
                    }});
}

void Flags::choice(const char* name, const char* help, std::vector<std::string> words, std::string* value) {
  const std::string flag = name;
  flags_.push_back({name, joined(words, "|"), help, [=](std::string_view given) -> Failure {
                      if (std::find(words.begin(), words.end(), given) == words.end()) return none_of(flag, given, words);
                      *value = given;
                      return {};
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

Failure Flags::parse(int argc, char** argv, Asked* asked) {
  *asked = asked_for(argc - 1, argv + 1, [&](std::string_view word) {
    const Flag* flag = find(word);
    return flag != nullptr && !flag->value_name.empty();
  });
  return *asked == Asked::kNothing ? as_usage(parse_all(argc, argv)) : Failure{};
}

// A word without dashes may be a flag whose dashes were forgotten.
Failure Flags::unknown(std::string_view name) const {
  constexpr const char* kMore = "; --help lists the flags";
  if (!name.starts_with("-")) {
    const std::string dashed = "--" + std::string(name);
    return {"unexpected argument " + quoted(name) + (find(dashed) ? " (did you mean " + dashed + "?)" : "") + kMore};
  }
  std::vector<std::string> names = {"--help", "--version"};
  for (const Flag& known : flags_) names.push_back(known.name);
  return {"unknown flag " + std::string(name) + did_you_mean(name, names) + kMore};
}

Failure Flags::parse_all(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::string_view name = argv[i], value;
    const size_t equals = name.find('=');
    const bool attached = name.substr(0, 2) == "--" && equals != std::string_view::npos;
    if (attached) {
      value = name.substr(equals + 1);
      name = name.substr(0, equals);
    }
    const Flag* flag = find(name);
    if (flag == nullptr) return unknown(name);
    if (given(flag->name.c_str())) return {flag->name + ": is given twice"};
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
  return out + "  --help" + std::string(kColumn - 8, ' ') + "this text, also -h\n" +  //
         "  --version" + std::string(kColumn - 11, ' ') + "the version of the program\n";
}

}  // namespace generate
