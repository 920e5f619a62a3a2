// SPDX-License-Identifier: MIT
// Columns and diagonals to which the last queries of the chunk give the largest weights (Jiang et al., "MInference 1.0",
// arXiv 2407.02490, algorithm 2).
//
// Diagonals come in bands of 16. All queries of a block of 128 attend the block's keys of a diagonal, 128 side by side. A
// band adds only 15 keys to them, so single diagonals would save nothing.
#include <algorithm>
#include <cmath>

#include "lib/patterns/pattern.h"

namespace tandem {
namespace {

constexpr int64_t kBand = kPatternBand;  // diagonals per band

class VerticalSlash final : public PatternIndex {
 public:
  explicit VerticalSlash(const HeadChunk& chunk) : pattern_(*chunk.pattern) {}

  Probe probe(const HeadChunk& chunk) override {
    const int64_t n_queries = chunk.queries.end - chunk.queries.begin, n = std::min(n_queries, kProbedQueries);
    first_probe_ = chunk.queries.end - n;
    Probe probe;
    probe.q.assign(chunk.q + (n_queries - n) * chunk.dim, chunk.q + n_queries * chunk.dim);
    for (int64_t t = 0; t < n; ++t) probe.ends.push_back(first_probe_ + t + 1);
    columns_.assign(static_cast<size_t>(chunk.queries.end), 0.0f);
    of_pieces_.assign(static_cast<size_t>((chunk.queries.end + kProbePiece - 1) / kProbePiece), {});
    return probe;
  }

  // Adds each weight of the piece to its key's column and to the band of its distance (kBand neighbouring distances).
  // own.first: the piece's nearest band, which has the distance from the first probed query to the piece's last key.
  void take(const ProbePiece& piece) override {
    const int64_t n_rows = piece.probe->n_rows();
    PieceBands& own = of_pieces_[static_cast<size_t>(piece.first / kProbePiece)];
    own.first = std::max<int64_t>(0, first_probe_ - (piece.first + piece.n - 1)) / kBand;
    own.sums.assign(static_cast<size_t>((first_probe_ + n_rows - 1 - piece.first) / kBand - own.first + 1), 0.0f);
    for (int64_t t = 0; t < n_rows; ++t) {
      const float* const logits = piece.logits + t * piece.n;
      const int64_t token = first_probe_ + t, n_seen = std::min(piece.n, token + 1 - piece.first);
      for (int64_t j = 0; j < n_seen; ++j) {
        const float weight = std::exp(logits[j] - piece.lse[t]);
        columns_[static_cast<size_t>(piece.first + j)] += weight;
        own.sums[static_cast<size_t>((token - piece.first - j) / kBand - own.first)] += weight;
      }
    }
  }

  void finish() override {
    std::vector<float> sums(static_cast<size_t>((std::ssize(columns_) - 1) / kBand + 1), 0.0f);
    for (const PieceBands& piece : of_pieces_)
      for (size_t i = 0; i < piece.sums.size(); ++i) sums[static_cast<size_t>(piece.first) + i] += piece.sums[i];
    sums[0] = INFINITY;
    bands_ = find_largest(sums, std::max<int64_t>(1, (pattern_.slash_len + kBand - 1) / kBand));
    tokens_ = find_largest(columns_, pattern_.vertical_len);
    columns_ = {};
    of_pieces_ = {};
  }

  void name(TokenRange block, BlockKeys* keys) const override {
    for (const int32_t token : tokens_) {
      if (token >= block.begin) break;
      keys->add(token, token + 1);
    }
    for (const int32_t band : bands_)
      keys->add(block.begin - (band + 1) * kBand + 1, std::min(block.end - band * kBand, block.begin));
  }

 private:
  struct PieceBands {
    int64_t first = 0;
    std::vector<float> sums;
  };

  const HeadPattern& pattern_;
  int64_t first_probe_ = 0;
  std::vector<float> columns_;         // sums of weights, per token
  std::vector<PieceBands> of_pieces_;  // sums of weights, per band of each piece
  std::vector<int32_t> tokens_, bands_;
};

}  // namespace

const Pattern kPatternVerticalSlash = {
    TANDEM_PATTERN_VERTICAL_SLASH,
    [](const HeadChunk& chunk) -> std::unique_ptr<PatternIndex> { return std::make_unique<VerticalSlash>(chunk); }};

}  // namespace tandem
