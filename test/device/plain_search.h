// SPDX-License-Identifier: MIT
// A search for chunks in double precision, as lib/tables/search.h words it: one block, one key and one chunk at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lib/tables/search.h"

namespace tandem::test {

using Row = std::vector<double>;
using Chunks = std::vector<int64_t>;  // numbers of chunks, ascending

// One query block, the rules of its search, and where the numbers come from. Members are named as in DeviceSearch.
struct PlainSearch {
  std::vector<DeviceSearchStage> stages;
  int64_t sink_len = 0, window_len = 0;
  bool shares_lists = false, keeps_lists = false;
  int32_t n_kv_heads = 0, group_size = 0;
  double scale = 0.0;
  int64_t p0 = 0, q_len = 0;

  std::function<Row(int64_t token, int32_t kv_head)> key;
  std::function<Row(int64_t query, int32_t head)> query;                          // query 0 is token p0
  std::function<Row(int32_t bounds_idx, int64_t chunk, int32_t kv_head)> bounds;  // the smallest numbers, then the largest

  int32_t n_lists() const { return shares_lists ? 1 : n_kv_heads; }
  int64_t window_begin() const;  // where the range of a key list begins
  bool is_there(size_t stage) const;
  uint32_t places() const;  // bit i: stage i is there
  int64_t candidates_end() const;
};

// A rounded search may take another way through a chunk than an exact one, where two logits hardly differ. Its score is then
// another, too, but it is in [least, most]. A score that is NaN is infinity here: it comes before all others.
struct ChunkScore {
  double value = 0.0;
  double least = 0.0, most = 0.0;
};

// Two numbers that differ by less than this share of their size, or of 1 where they are smaller, may be equal to whoever
// rounds.
inline constexpr double kScoreTolerance = 1e-4;
double tolerance_of(double a, double b);

// What a stage looks at. before: the stage before it that is there, and what that has kept; -1: there is none.
Chunks find_candidates(const PlainSearch& search, size_t stage, int64_t before, const Chunks& kept_before);
// Whether the stage keeps all candidates and judges none.
bool keeps_all(const PlainSearch& search, size_t stage, const Chunks& candidates);
// One score for each candidate.
std::vector<ChunkScore> judge_chunks(const PlainSearch& search, size_t stage, int32_t list, const Chunks& candidates);
// The chunks that a stage keeps because of their scores.
Chunks keep_best(const PlainSearch& search, size_t stage, const Chunks& candidates, const std::vector<ChunkScore>& scores);
// The same chunks and, with plus_next, those behind them.
Chunks add_next(const PlainSearch& search, size_t stage, const Chunks& best);
int64_t n_best(const DeviceSearchStage& stage);  // chunks that are kept because of their scores

// Whether the stage runs. head: of its list. before_runs: whether the stage before it that is there runs.
bool stage_runs(const PlainSearch& search, size_t stage, const KeptList& head, uint32_t mark, bool before_runs);

// A stage's list as a search finds it and as it leaves it.
struct PlainList {
  KeptList head;
  Chunks chunks;
  bool has_run = false;  // in the search that was last
};
// The whole search for one list. lists: [n_stages]; those of stages that do not run stay as they are.
void search_list(const PlainSearch& search, int32_t list, uint32_t mark, std::vector<PlainList>* lists);

// The tokens that the key list names in front of its range. lists: after the search.
std::vector<int64_t> named_tokens(const PlainSearch& search, const std::vector<PlainList>& lists);

}  // namespace tandem::test
