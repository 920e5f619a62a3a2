// SPDX-License-Identifier: MIT
// lib/patterns/pattern_table.cc with one more line.
#include "lib/patterns/pattern.h"

namespace tandem {

extern const Pattern kPatternCheckerboard;

std::span<const Pattern* const> pattern_table() {
  static constexpr const Pattern* kPatterns[] = {
      &kPatternFull, &kPatternAShape, &kPatternVerticalSlash, &kPatternBlockSparse, &kPatternCheckerboard,
  };
  return kPatterns;
}

}  // namespace tandem
