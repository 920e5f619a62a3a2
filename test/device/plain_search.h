// SPDX-License-Identifier: MIT
// A search for chunks in double precision. The code follows the words of lib/tables/search.h: one block, one key and one
// chunk at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lib/tables/search.h"

namespace tandem::test {

using Row = std::vector<double>;
using Chunks = std::vector<int64_t>;  // numbers of chunks, ascending

// One query block, the rules of its search, and functions that return its numbers. Members are named as in DeviceSearch.
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
  int64_t window_begin() const;  // first token of the range of a key list
  bool is_there(size_t stage) const;
  uint32_t places() const;  // bit i is set if stage i exists
  int64_t candidates_end() const;
};

// The score of a chunk. Where two logits hardly differ, a search with rounding may take another way through a chunk than an
// exact one. Its score differs then, but lies in [least, most]. A NaN score is infinity here, so it comes before all others.
struct ChunkScore {
  double value = 0.0;
  double least = 0.0, most = 0.0;
};

// Two numbers that differ by less than this share of the larger one may be equal after rounding. Numbers below 1 count as 1.
inline constexpr double kScoreTolerance = 1e-4;
double tolerance_of(double a, double b);

// Returns the candidates of a stage. before: the existing stage before it, which kept kept_before; -1: no stage comes before
// it.
Chunks find_candidates(const PlainSearch& search, size_t stage, int64_t before, const Chunks& kept_before);
// True if the stage keeps all candidates and judges none.
bool keeps_all(const PlainSearch& search, size_t stage, const Chunks& candidates);
// Returns one score for each candidate.
std::vector<ChunkScore> judge_chunks(const PlainSearch& search, size_t stage, int32_t list, const Chunks& candidates);
// Returns the chunks that a stage keeps because of their scores.
Chunks keep_best(const PlainSearch& search, size_t stage, const Chunks& candidates, const std::vector<ChunkScore>& scores);
// Returns the same chunks and, with plus_next, the chunk after each.
Chunks add_next(const PlainSearch& search, size_t stage, const Chunks& best);
int64_t n_best(const DeviceSearchStage& stage);  // number of chunks that are kept because of their scores

// True if the stage runs. head: header of the stage's list. before_runs: the existing stage before it runs.
bool stage_runs(const PlainSearch& search, size_t stage, const KeptList& head, uint32_t mark, bool before_runs);

// A stage's list, before or after a search.
struct PlainList {
  KeptList head;
  Chunks chunks;
  bool has_run = false;  // in the last search
};
// Makes the whole search for one list. lists: [n_stages]. Lists of stages that do not run stay as they are.
void search_list(const PlainSearch& search, int32_t list, uint32_t mark, std::vector<PlainList>* lists);

// Returns the tokens that the key list names before its range. lists: after the search.
std::vector<int64_t> named_tokens(const PlainSearch& search, const std::vector<PlainList>& lists);

}  // namespace tandem::test
