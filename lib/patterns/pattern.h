// SPDX-License-Identifier: MIT
// A head pattern: which keys a block of queries of one query head attends. A pattern is a file in this folder, a line and a
// declaration in the source of the table (lib/patterns/pattern_table.cc), a line in lib/CMakeLists.txt, and its number in
// patterns.h of the ABI.
//
// A head's queries are taken in chunks (kPatternChunk). For each chunk a head that has the pattern gets a PatternIndex,
// which is asked in this order:
//
// clang-format off
//   probe     rows whose logits with keys it wants, if any: queries of the chunk, or means of some
//   take      these logits, piece of keys by piece. Several threads call this, for pieces of their own
//   finish    when all pieces are there
//   name      the keys of a block of the chunk. Several threads call this
// clang-format on
//
// Logits with all keys are the same work for all patterns that choose keys by them, and lib/select/probe.h does it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lib/policy/head_patterns.h"
#include "lib/store/row_cursor.h"
#include "lib/tables/pattern_lists.h"

namespace tandem {

inline constexpr int64_t kMostProbes = 64;    // rows of a probe
inline constexpr int64_t kProbePiece = 2048;  // keys of a piece, but for the last one
// The last queries of a chunk, whose weights choose columns and diagonals.
inline constexpr int64_t kProbedQueries = kPatternProbes;

// A chunk of queries of one query head.
struct HeadChunk {
  const HeadPattern* pattern = nullptr;
  TokenRange queries;        // their tokens
  const float* q = nullptr;  // [n_queries, dim], as attention reads them; null where a list serves several query heads
  int32_t dim = 0;
};

// Row r sees the keys [0, ends[r]), with ends that do not decrease.
struct Probe {
  std::vector<float> q;  // [n_rows, dim]
  std::vector<int64_t> ends;

  int64_t n_rows() const { return static_cast<int64_t>(ends.size()); }
  int64_t n_keys() const { return ends.empty() ? 0 : ends.back(); }
};

// Keys [first, first + n) of a probe; first is a multiple of kProbePiece.
struct ProbePiece {
  const Probe* probe = nullptr;
  int64_t first = 0, n = 0;
  const float* logits = nullptr;  // [n_rows, n]; -inf where a row does not see the key
  const float* lse = nullptr;     // [n_rows], over all keys that the row sees
};

// The units of kPatternUnit tokens that a block attends, and the token that it attends all keys from.
class BlockKeys {
 public:
  // The block's first query is at token `begin`, which it attends all keys from unless more are added.
  void clear(int64_t begin);
  void add(int64_t begin, int64_t end);  // tokens [begin, end), and those of the same units
  void add_newest(int64_t begin);        // tokens from `begin` on
  int64_t newest_begin() const { return newest_begin_; }
  // The units that begin before newest_begin(), ascending.
  void append_units(std::vector<int32_t>* units) const;

 private:
  int64_t newest_begin_ = 0;
  std::vector<uint64_t> named_;  // a bit for each unit before the block
};

class PatternIndex {
 public:
  virtual ~PatternIndex() = default;
  virtual Probe probe(const HeadChunk&) { return {}; }
  virtual void take(const ProbePiece&) {}
  virtual void finish() {}
  virtual void name(TokenRange block, BlockKeys* keys) const = 0;
};

struct Pattern {
  uint32_t kind;  // TANDEM_PATTERN_*
  std::unique_ptr<PatternIndex> (*make)(const HeadChunk& chunk);
};

std::span<const Pattern* const> pattern_table();
uint32_t known_pattern_kinds();  // of all patterns in the table
extern const Pattern kPatternFull, kPatternAShape, kPatternVerticalSlash, kPatternBlockSparse;

// The n largest scores, the lower index first where some are equal; ascending indices. NaN is less than all others.
std::vector<int32_t> find_largest(std::span<const float> scores, int64_t n);

}  // namespace tandem
