// SPDX-License-Identifier: MIT
#include "tools/common/flags.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "examples/generate/nearest_name.h"
#include "tools/common/run_tool.h"

namespace tools {
namespace {

// Number: int64_t or double.
template <typename Number>
Stored parse_number(const std::string& value, Number min, Number max, Number* to) {
  Number number = 0;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  if (error == std::errc::invalid_argument || stop != end || std::isnan(static_cast<double>(number)))
    return Stored::kNotAValue;
  if (error != std::errc() || number < min || number > max) return Stored::kOutOfRange;
  *to = number;
  return Stored::kYes;
}

// Calls parse() for every element of "a,b,c". Stores the list only if all elements are good and there is at least one.
template <typename T, typename Parse>
Stored parse_list(const std::string& value, std::vector<T>* to, const Parse& parse) {
  std::vector<T> list;
  for (size_t begin = 0; begin <= value.size();) {
    const size_t end = std::min(value.find(',', begin), value.size());
    T element{};
    const Stored stored = parse(value.substr(begin, end - begin), &element);
    if (stored != Stored::kYes) return stored;
    list.push_back(element);
    begin = end + 1;
  }
  *to = std::move(list);
  return Stored::kYes;
}

Stored parse_choice(const std::string& value, const std::vector<Choice>& choices, int32_t* to) {
  for (const Choice& choice : choices) {
    if (value != choice.name) continue;
    *to = choice.value;
    return Stored::kYes;
  }
  return Stored::kNotAValue;
}

std::vector<std::string> choice_words(const std::vector<Choice>& choices) {
  std::vector<std::string> words;
  for (const Choice& choice : choices) words.emplace_back(choice.name);
  return words;
}

std::string choice_names(const std::vector<Choice>& choices, const char* separator) {
  std::string names;
  for (const Choice& choice : choices) names += (names.empty() ? "" : separator) + std::string(choice.name);
  return names;
}

const Flag* find_flag(const std::vector<Flag>& flags, std::string_view name) {
  for (const Flag& flag : flags)
    if (flag.name == name) return &flag;
  return nullptr;
}

std::vector<std::string> names_of(const std::vector<Flag>& flags) {
  std::vector<std::string> names;
  for (const Flag& flag : flags) names.push_back(flag.name);
  return names;
}

// Handles a word in the place of a flag. The user may have forgotten the dashes.
Result positional(const std::vector<Flag>& flags, const std::string& word) {
  const bool is_flag = find_flag(flags, "--" + word) != nullptr;
  return usage_error("unexpected argument \"%s\"%s; --help lists the flags", word.c_str(),
                     is_flag ? (" (did you mean --" + word + "?)").c_str() : "");
}

// Returns a "did you mean" for the first element that is none of the flag's words.
std::string nearest_word(const Flag& flag, const std::string& value) {
  for (size_t begin = 0; begin <= value.size();) {
    const size_t end = std::min(value.find(',', begin), value.size());
    const std::string element = value.substr(begin, end - begin);
    if (std::find(flag.words.begin(), flag.words.end(), element) == flag.words.end())
      return generate::did_you_mean(element, flag.words);
    begin = end + 1;
  }
  return "";
}

Result store(const Flag& flag, const std::string& value) {
  const Stored stored = flag.store(value);
  if (stored == Stored::kNotAValue)
    return usage_error("%s = %s is not %s%s", flag.name.c_str(), value.c_str(), flag.expected.c_str(),
                       nearest_word(flag, value).c_str());
  if (stored == Stored::kOutOfRange)
    return usage_error("%s = %s is out of range: it must be %s", flag.name.c_str(), value.c_str(), flag.expected.c_str());
  return {};
}

std::string number_range(int64_t min, int64_t max) {
  return text("a whole number from %lld to %lld", static_cast<long long>(min), static_cast<long long>(max));
}

}  // namespace

Flag switch_flag(const char* name, bool* to, const char* help) {
  return {name, "", help, "", [to](const std::string&) {
            *to = true;
            return Stored::kYes;
          }};
}

Flag text_flag(const char* name, const char* value_name, std::string* to, const char* help) {
  return {name, value_name, help, "a text", [to](const std::string& value) {
            *to = value;
            return value.empty() ? Stored::kNotAValue : Stored::kYes;
          }};
}

Flag number_flag(const char* name, int64_t* to, int64_t min, int64_t max, const char* help) {
  return {name, "N", help, number_range(min, max),
          [=](const std::string& value) { return parse_number(value, min, max, to); }};
}

Flag numbers_flag(const char* name, std::vector<int64_t>* to, int64_t min, int64_t max, const char* help) {
  return {name, "N[,N...]", help, number_range(min, max) + ", or several with commas", [=](const std::string& value) {
            return parse_list(value, to, [=](const std::string& element, int64_t* number) {
              return parse_number(element, min, max, number);
            });
          }};
}

Flag real_flag(const char* name, double* to, double min, double max, const char* help) {
  return {name, "X", help, text("a number from %g to %g", min, max),
          [=](const std::string& value) { return parse_number(value, min, max, to); }};
}

Flag choice_flag(const char* name, int32_t* to, std::vector<Choice> choices, const char* help) {
  return {name,
          choice_names(choices, "|"),
          help,
          "one of " + choice_names(choices, ", "),
          [=](const std::string& value) { return parse_choice(value, choices, to); },
          choice_words(choices)};
}

Flag choices_flag(const char* name, std::vector<int32_t>* to, std::vector<Choice> choices, const char* help) {
  return {name,
          choice_names(choices, "|") + "[,...]",
          help,
          "one of " + choice_names(choices, ", ") + ", or several with commas",
          [=](const std::string& value) {
            return parse_list(value, to, [&](const std::string& element, int32_t* choice) {
              return parse_choice(element, choices, choice);
            });
          },
          choice_words(choices)};
}

std::vector<Choice> library_choices(const char* (*name)(int32_t idx)) {
  std::vector<Choice> choices;
  for (int32_t idx = 0; name(idx); ++idx) choices.push_back({name(idx), idx});
  return choices;
}

const std::vector<Choice>& key_type_choices() {
  static const std::vector<Choice> choices = [] {
    std::vector<Choice> keys;
    for (const Choice& choice : dtype_choices())
      if (choice.value != TANDEM_Q4_64) keys.push_back(choice);
    return keys;
  }();
  return choices;
}

const std::vector<Choice>& dtype_choices() {
  static const std::vector<Choice> choices = [] {
    std::vector<Choice> all;
    for (int32_t dtype = 1; const char* name = tandem_dtype_name(dtype); ++dtype) all.push_back({name, dtype});
    return all;
  }();
  return choices;
}

const char* dtype_name(int32_t dtype) {
  for (const Choice& choice : dtype_choices())
    if (choice.value == dtype) return choice.name;
  return "?";
}

int64_t float_bytes(int32_t dtype) { return dtype == TANDEM_F32 ? 4 : 2; }

void declare_standard(std::vector<Flag>* flags) {
  const auto never = [](const std::string&) { return Stored::kYes; };
  flags->push_back({"--help", "", "this text, also -h", "", never, {}});
  flags->push_back({"--version", "", "the version of the program", "", never, {}});
}

Asked asked_by(const std::vector<Flag>& flags, int argc, const char* const* argv) {
  return generate::asked_for(argc, argv, [&](std::string_view word) {
    const Flag* flag = find_flag(flags, word);
    return flag != nullptr && !flag->value_name.empty();
  });
}

Result answer(Asked asked, const char* program, const std::string& help) {
  std::fputs(asked == Asked::kVersion ? generate::version_text(program).c_str() : help.c_str(), stdout);
  return flush_stdout();
}

Result refuse_given(const std::vector<std::string>& given, const std::vector<std::string>& names, const std::string& why) {
  for (const std::string& name : given)
    if (std::find(names.begin(), names.end(), name) != names.end()) return usage_error("%s %s", name.c_str(), why.c_str());
  return {};
}

Result parse_flags(const std::vector<Flag>& flags, int argc, const char* const* argv, Asked* asked,
                   std::vector<std::string>* given) {
  *asked = asked_by(flags, argc, argv);
  if (*asked != Asked::kNothing) return {};
  std::vector<std::string> names;
  for (int i = 0; i < argc; ++i) {
    std::string name = argv[i];
    if (name.rfind('-', 0) != 0) return positional(flags, name);
    std::string value;
    const size_t equals = name.find('=');
    const bool has_value = equals != std::string::npos;
    if (has_value) {
      value = name.substr(equals + 1);
      name.resize(equals);
    }
    const Flag* flag = find_flag(flags, name);
    if (flag == nullptr)
      return usage_error("unknown flag %s%s; --help lists the flags", name.c_str(),
                         generate::did_you_mean(name, names_of(flags)).c_str());
    if (!flag->may_repeat && std::find(names.begin(), names.end(), name) != names.end())
      return usage_error("%s is given twice", name.c_str());
    if (flag->value_name.empty()) {
      if (has_value) return usage_error("%s = %s: the flag takes no value", name.c_str(), value.c_str());
    } else if (!has_value) {
      if (i + 1 == argc) return usage_error("%s needs a value: %s", name.c_str(), flag->expected.c_str());
      value = argv[++i];
    }
    TOOL_TRY(store(*flag, value));
    names.push_back(name);
  }
  if (given != nullptr) *given = std::move(names);
  return {};
}

std::string flags_help(const std::vector<Flag>& flags) {
  size_t width = 0;
  for (const Flag& flag : flags) width = std::max(width, flag.name.size() + 1 + flag.value_name.size());
  std::string out;
  for (const Flag& flag : flags) {
    const std::string left = flag.name + " " + flag.value_name;
    out += text("  %-*s  %s\n", static_cast<int>(width), left.c_str(), flag.help.c_str());
  }
  return out;
}

}  // namespace tools
