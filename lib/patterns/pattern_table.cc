// SPDX-License-Identifier: MIT
// All head patterns.
#include "lib/patterns/pattern.h"

namespace tandem {

std::span<const Pattern* const> pattern_table() {
  static constexpr const Pattern* kPatterns[] = {
      &kPatternFull,
      &kPatternAShape,
      &kPatternVerticalSlash,
      &kPatternBlockSparse,
  };
  return kPatterns;
}

}  // namespace tandem
