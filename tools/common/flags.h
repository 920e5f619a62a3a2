// SPDX-License-Identifier: MIT
// Command lines: a table of flags, each with the variable that it sets and the values that it takes. A flag that is not in
// the table and a value that the flag does not take are refused by name:
//   --kv-len = 12k is not a whole number from 1 to 2147483648
//   --kv-len = 0 is out of range: it must be a whole number from 1 to 2147483648
//   --kv-type = bf61 is not one of f32, f16, bf16, e4m3, q8_0, q4_0 (did you mean bf16?)
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "examples/generate/standard_flags.h"
#include "tools/common/result.h"

namespace tools {

using generate::Asked;

enum class Stored { kYes, kNotAValue, kOutOfRange };

struct Flag {
  std::string name;        // "--kv-len"
  std::string value_name;  // "N[,N...]"; empty: a switch without a value
  std::string help;
  std::string expected;  // "a whole number from 1 to 8"
  std::function<Stored(const std::string&)> store;
  std::vector<std::string> words = {};  // for a choice: its values
  bool may_repeat = false;
};

struct Choice {
  const char* name;
  int32_t value;
};

Flag switch_flag(const char* name, bool* to, const char* help);
Flag text_flag(const char* name, const char* value_name, std::string* to, const char* help);
Flag number_flag(const char* name, int64_t* to, int64_t min, int64_t max, const char* help);
Flag numbers_flag(const char* name, std::vector<int64_t>* to, int64_t min, int64_t max, const char* help);
Flag real_flag(const char* name, double* to, double min, double max, const char* help);
Flag choice_flag(const char* name, int32_t* to, std::vector<Choice> choices, const char* help);
Flag choices_flag(const char* name, std::vector<int32_t>* to, std::vector<Choice> choices, const char* help);

// Returns the names that the library lists by index, for example by tandem_policy_name() and tandem_cpu_isa_name().
std::vector<Choice> library_choices(const char* (*name)(int32_t idx));

// TANDEM_F32, ... and their names on command lines.
const std::vector<Choice>& dtype_choices();
const std::vector<Choice>& key_type_choices();  // for keys and values
const char* dtype_name(int32_t dtype);
int64_t float_bytes(int32_t dtype);  // f32, f16, bf16

// Adds --help and --version, as lines of the help text. asked_by() and parse_flags() recognise them.
void declare_standard(std::vector<Flag>* flags);
Asked asked_by(const std::vector<Flag>& flags, int argc, const char* const* argv);
// Prints the help text, or the version.
Result answer(Asked asked, const char* program, const std::string& help);

// Refuses the first of the given flags that is in `names`, with the reason: "--alpha is for --policy hgca alone".
Result refuse_given(const std::vector<std::string>& given, const std::vector<std::string>& names, const std::string& why);

// Parses "--name value" and "--name=value". A name may occur once unless it may repeat. Everything else is refused. If help
// or the version is asked for, sets *asked and stores nothing. given (may be NULL): receives the names that occurred.
Result parse_flags(const std::vector<Flag>& flags, int argc, const char* const* argv, Asked* asked,
                   std::vector<std::string>* given = nullptr);
// Returns one line per flag.
std::string flags_help(const std::vector<Flag>& flags);

}  // namespace tools
