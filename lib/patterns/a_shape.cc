// SPDX-License-Identifier: MIT
// Sinks and a window (Xiao et al., "Efficient streaming language models with attention sinks", arXiv 2309.17453).
#include "lib/patterns/pattern.h"

namespace tandem {
namespace {

class AShape final : public PatternIndex {
 public:
  explicit AShape(const HeadPattern& pattern) : pattern_(pattern) {}
  void name(TokenRange block, BlockKeys* keys) const override {
    keys->add(0, pattern_.sink_len);
    keys->add_newest(block.begin + 1 - pattern_.window_len);
  }

 private:
  const HeadPattern& pattern_;
};

}  // namespace

const Pattern kPatternAShape = {TANDEM_PATTERN_A_SHAPE, [](const HeadChunk& chunk) -> std::unique_ptr<PatternIndex> {
                                  return std::make_unique<AShape>(*chunk.pattern);
                                }};

}  // namespace tandem
