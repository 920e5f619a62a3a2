// SPDX-License-Identifier: MIT
// -h, --help and --version, which mean the same in every program: they are answered wherever they stand, but as the value of
// another flag, and nothing else of the line is looked at. Nothing but headers, as all programs include it.
#ifndef EXAMPLES_GENERATE_STANDARD_FLAGS_H_
#define EXAMPLES_GENERATE_STANDARD_FLAGS_H_

#include <string>
#include <string_view>

#include "tandem/tandem.h"

namespace generate {

enum class Asked { kNothing, kHelp, kVersion };

// takes_value(word): whether the next word belongs to this one.
template <typename TakesValue>
Asked asked_for(int n_words, const char* const* words, const TakesValue& takes_value) {
  for (int i = 0; i < n_words; ++i) {
    const std::string_view word = words[i];
    if (word == "-h" || word == "--help") return Asked::kHelp;
    if (word == "--version") return Asked::kVersion;
    if (takes_value(word)) ++i;
  }
  return Asked::kNothing;
}

// "tandem-info 0.2.0\n"
inline std::string version_text(const char* program) {
  return std::string(program) + " " + std::to_string(TANDEM_VERSION_MAJOR) + "." + std::to_string(TANDEM_VERSION_MINOR) +
         "." + std::to_string(TANDEM_VERSION_PATCH) + "\n";
}

}  // namespace generate

#endif  // EXAMPLES_GENERATE_STANDARD_FLAGS_H_
