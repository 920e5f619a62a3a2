// SPDX-License-Identifier: MIT
// -h, --help and --version work in every program, anywhere on the line except as another flag's value. The rest of the line
// is then ignored. Only headers are used, as all programs include this file.
#ifndef EXAMPLES_GENERATE_STANDARD_FLAGS_H_
#define EXAMPLES_GENERATE_STANDARD_FLAGS_H_

#include <string>
#include <string_view>

#include "tandem/tandem.h"

namespace generate {

enum class Asked { kNothing, kHelp, kVersion };

// takes_value(word): returns whether the next word is this word's value.
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

// Returns "tandem-info 0.2.0\n".
inline std::string version_text(const char* program) {
  return std::string(program) + " " + std::to_string(TANDEM_VERSION_MAJOR) + "." + std::to_string(TANDEM_VERSION_MINOR) +
         "." + std::to_string(TANDEM_VERSION_PATCH) + "\n";
}

}  // namespace generate

#endif  // EXAMPLES_GENERATE_STANDARD_FLAGS_H_
