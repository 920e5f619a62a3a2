// SPDX-License-Identifier: MIT
// The full pattern: queries attend every key.
#include "lib/patterns/pattern.h"

namespace tandem {
namespace {

struct Full final : PatternIndex {
  void name(TokenRange, BlockKeys* keys) const override { keys->add_newest(0); }
};

}  // namespace

const Pattern kPatternFull = {TANDEM_PATTERN_FULL,
                              [](const HeadChunk&) -> std::unique_ptr<PatternIndex> { return std::make_unique<Full>(); }};

}  // namespace tandem
