// SPDX-License-Identifier: MIT
// A head pattern says which keys a block of queries of one query head attends. A new pattern needs a file in this folder, a
// line and a declaration in the source of the table (lib/patterns/pattern_table.cc), a line in lib/CMakeLists.txt, and its
// number in patterns.h of the ABI.
//
// A head's queries are processed in chunks (kPatternChunk). For each chunk, a head with the pattern gets a PatternIndex. Its
// functions are called in this order:
//
// clang-format off
//   probe     returns the rows whose logits it wants, if any: queries of the chunk, or means of several
//   take      gets these logits, one piece of keys at a time. Several threads call it, each with its own pieces
//   finish    called after all pieces
//   name      names the keys of a block of the chunk. Several threads call it
// clang-format on
//
// The logits over all keys are computed once for all patterns that need them, by lib/select/probe.h.
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
inline constexpr int64_t kProbePiece = 2048;  // keys per piece; the last piece may be shorter
// Number of last queries of a chunk whose weights choose columns and diagonals.
inline constexpr int64_t kProbedQueries = kPatternProbes;

// A chunk of queries of one query head.
struct HeadChunk {
  const HeadPattern* pattern = nullptr;
  TokenRange queries;        // tokens of the queries
  const float* q = nullptr;  // [n_queries, dim], as attention reads them; null if a list serves several query heads
  int32_t dim = 0;
};

// Rows to multiply with keys. Row r sees the keys [0, ends[r]). The ends never decrease.
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

// The keys of a block: units of kPatternUnit tokens, and all tokens from newest_begin() on.
class BlockKeys {
 public:
  // Starts with no units and all keys from token `begin` on, the token of the block's first query.
  void clear(int64_t begin);
  void add(int64_t begin, int64_t end);  // adds tokens [begin, end), rounded out to whole units
  void add_newest(int64_t begin);        // adds all tokens from `begin` on
  int64_t newest_begin() const { return newest_begin_; }
  // Appends the units that begin before newest_begin(), ascending.
  void append_units(std::vector<int32_t>* units) const;

 private:
  int64_t newest_begin_ = 0;
  std::vector<uint64_t> named_;  // one bit for each unit before the block
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

// Returns the indices of the n largest scores, ascending. Of equal scores the lower index comes first. NaN is less than all
// other values.
std::vector<int32_t> find_largest(std::span<const float> scores, int64_t n);

}  // namespace tandem
