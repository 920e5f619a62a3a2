// SPDX-License-Identifier: MIT
// Blocks of keys whose mean best fits the mean of a block of queries (MInference 1.0, arXiv 2407.02490, algorithm 3). The
// mean of a key block's logits with the mean query equals the product of the two means.
#include <algorithm>

#include "lib/patterns/pattern.h"

namespace tandem {
namespace {

constexpr int64_t kKeyBlock = kPatternKeyBlock;
static_assert(kPatternChunk / kPatternBlock <= kMostProbes && kProbePiece % kKeyBlock == 0);

class BlockSparse final : public PatternIndex {
 public:
  explicit BlockSparse(const HeadChunk& chunk) : pattern_(*chunk.pattern), first_query_(chunk.queries.begin) {}

  // A block of queries chooses among the key blocks that end before its first query.
  Probe probe(const HeadChunk& chunk) override {
    Probe probe;
    for (int64_t begin = chunk.queries.begin; begin < chunk.queries.end; begin += kPatternBlock) {
      const int64_t n = std::min(kPatternBlock, chunk.queries.end - begin), at = std::ssize(probe.q);
      probe.q.resize(static_cast<size_t>(at + chunk.dim), 0.0f);
      for (int64_t t = 0; t < n; ++t)
        for (int32_t d = 0; d < chunk.dim; ++d)
          probe.q[static_cast<size_t>(at + d)] += chunk.q[(begin - chunk.queries.begin + t) * chunk.dim + d];
      for (int32_t d = 0; d < chunk.dim; ++d) probe.q[static_cast<size_t>(at + d)] /= static_cast<float>(n);
      probe.ends.push_back(begin / kKeyBlock * kKeyBlock);
      means_.emplace_back(static_cast<size_t>(begin / kKeyBlock));
    }
    return probe;
  }

  void take(const ProbePiece& piece) override {
    for (int64_t row = 0; row < piece.probe->n_rows(); ++row) {
      const int64_t end = std::min(piece.probe->ends[static_cast<size_t>(row)], piece.first + piece.n);
      for (int64_t key = piece.first; key + kKeyBlock <= end; key += kKeyBlock) {
        float sum = 0.0f;
        for (int64_t i = 0; i < kKeyBlock; ++i) sum += piece.logits[row * piece.n + key - piece.first + i];
        means_[static_cast<size_t>(row)][static_cast<size_t>(key / kKeyBlock)] = sum / static_cast<float>(kKeyBlock);
      }
    }
  }

  void finish() override {
    for (const std::vector<float>& means : means_) chosen_.push_back(find_largest(means, pattern_.n_blocks));
    means_ = {};
  }

  void name(TokenRange block, BlockKeys* keys) const override {
    for (const int32_t chosen : chosen_[static_cast<size_t>((block.begin - first_query_) / kPatternBlock)])
      keys->add(chosen * kKeyBlock, (chosen + 1) * kKeyBlock);
    keys->add_newest(block.begin / kKeyBlock * kKeyBlock);
  }

 private:
  const HeadPattern& pattern_;
  const int64_t first_query_;
  std::vector<std::vector<float>> means_;     // [query blocks][key blocks]
  std::vector<std::vector<int32_t>> chosen_;  // [query blocks], key blocks
};

}  // namespace

const Pattern kPatternBlockSparse = {
    TANDEM_PATTERN_BLOCK_SPARSE,
    [](const HeadChunk& chunk) -> std::unique_ptr<PatternIndex> { return std::make_unique<BlockSparse>(chunk); }};

}  // namespace tandem
