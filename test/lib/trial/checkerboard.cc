// SPDX-License-Identifier: MIT
// A pattern that shows the work of adding a pattern: blocks of 128 queries and 128 keys like the fields of a chessboard. It
// consists of this file and one line of pattern_table.cc.
#include "lib/patterns/pattern.h"

namespace tandem {
namespace {

struct Checkerboard final : PatternIndex {
  void name(TokenRange block, BlockKeys* keys) const override {
    const int64_t own = block.begin / kPatternBlock;
    for (int64_t field = own % 2; field < own; field += 2) keys->add(field * kPatternBlock, (field + 1) * kPatternBlock);
  }
};

}  // namespace

extern const Pattern kPatternCheckerboard = {
    16u, [](const HeadChunk&) -> std::unique_ptr<PatternIndex> { return std::make_unique<Checkerboard>(); }};

}  // namespace tandem
