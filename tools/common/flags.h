// SPDX-License-Identifier: MIT
// Command lines: a table of flags, each with the variable it fills and the values it takes. What is not in the table,
// or not a value that the flag takes, is refused by name:
//   --kv-len = 12k is not a whole number from 1 to 2147483648
//   --kv-len = 0 is out of range: it must be a whole number from 1 to 2147483648
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/common/result.h"

namespace tools {

enum class Stored { kYes, kNotAValue, kOutOfRange };

struct Flag {
  std::string name;        // "--kv-len"
  std::string value_name;  // "N[,N...]"; empty: a switch without a value
  std::string help;
  std::string expected;  // "a whole number from 1 to 8"
  std::function<Stored(const std::string&)> store;
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

// Names that the library has by index: tandem_policy_name, tandem_cpu_isa_name.
std::vector<Choice> library_choices(const char* (*name)(int32_t idx));

// TANDEM_F32, ... and the names of DESIGN.md.
const std::vector<Choice>& dtype_choices();
const std::vector<Choice>& key_type_choices();  // of keys and values
const char* dtype_name(int32_t dtype);
int64_t float_bytes(int32_t dtype);  // f32, f16, bf16

// Takes "--name value", "--name=value", and -h for --help; everything else is refused. given (may be NULL): the names that
// were there.
Result parse_flags(const std::vector<Flag>& flags, int argc, const char* const* argv,
                   std::vector<std::string>* given = nullptr);
// One line per flag.
std::string flags_help(const std::vector<Flag>& flags);

}  // namespace tools
