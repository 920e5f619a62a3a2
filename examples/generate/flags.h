// SPDX-License-Identifier: MIT
// Command lines. Every flag is declared once, with its range and its help line. Unknown, repeated, out-of-range and
// malformed flags are refused with a message that names flag and value.
#ifndef EXAMPLES_GENERATE_FLAGS_H_
#define EXAMPLES_GENERATE_FLAGS_H_

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "failure.h"
#include "standard_flags.h"

namespace generate {

// Returns the failure "--policy: \"hgac\" is none of all, streaming, hgca (did you mean hgca?)".
Failure none_of(const std::string& flag, std::string_view given, const std::vector<std::string>& words);

class Flags {
 public:
  explicit Flags(std::string usage) : usage_(std::move(usage)) {}

  void text(const char* name, const char* value_name, const char* help, std::string* value);
  void integer(const char* name, const char* help, int64_t low, int64_t high, int64_t* value);
  void real(const char* name, const char* help, double low, double high, double* value);
  // One of the given words. *value becomes its index, counted from `first`.
  void choice(const char* name, const char* help, std::vector<std::string> words, int32_t* value, int32_t first = 0);
  void choice(const char* name, const char* help, std::vector<std::string> words, std::string* value);
  void toggle(const char* name, const char* help, bool* value);
  // Comma-separated numbers.
  void reals(const char* name, const char* help, double low, double high, std::vector<double>* values);

  // Parses the command line. If *asked is set, the rest of the line was ignored.
  Failure parse(int argc, char** argv, Asked* asked);
  bool given(const char* name) const { return given_.count(name) != 0; }
  // Refuses the first of `names` that was given. The message is the name and `why`.
  Failure refuse_given(std::initializer_list<const char*> names, const std::string& why) const;
  std::string help() const;

 private:
  struct Flag {
    std::string name, value_name, help;  // value_name empty: a toggle
    std::function<Failure(std::string_view)> take;
  };
  Failure parse_all(int argc, char** argv);
  Failure unknown(std::string_view name) const;
  const Flag* find(std::string_view name) const;

  std::string usage_;
  std::vector<Flag> flags_;
  std::set<std::string> given_;
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_FLAGS_H_
