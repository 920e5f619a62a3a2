// SPDX-License-Identifier: MIT
// Searches for the chunks that query blocks attend (the ABI's pruning.h has the rules). The stages run on the pool one after
// another, for some blocks of a call at a time.
//
// A stage has one task for each query block, KV head and piece of the block's candidates. The task scores the candidates. A
// stage that normalises shifts each row's logits by the row's log-sum-exp, which is known only when all pieces of the KV
// head are judged. So pieces store the largest logits of each row separately, and the worker that finishes the last piece
// joins them. The worker that finishes the last piece of a block keeps the block's best chunks, so a stage is one round of
// the pool. Candidates of the first stage are a range of chunks. Candidates of a later stage are the parts of the chunks
// that the stage before has kept.
#pragma once

#include <array>
#include <span>
#include <utility>
#include <vector>

#include "lib/base/status.h"
#include "lib/policy/pruning.h"
#include "lib/select/chunk_bounds.h"
#include "lib/select/keep_best.h"
#include "lib/store/row_cursor.h"
#include "lib/tables/backend.h"

namespace tandem {

// Lists that decode calls keep, one for each stage and list.
struct CachedLists {
  struct Stage {
    size_t place = 0;                // index of the stage in the record
    int64_t ran_at = 0;              // token of the query for which the stage ran
    std::vector<ChunkList> of_list;  // [n_lists]
  };
  std::array<Stage, kMostStages> stages;  // the first n are valid
  size_t n = 0;
  bool are_valid = false;

  // Takes the lists of the last n_run of the call's n_stages stages from `ran`.
  void take(CachedLists* ran, size_t n_stages, size_t n_run);
};

// Indices of a record's stages that are active for a query that sees n_seen tokens. Allocates nothing: a decode call of a
// length that was reached before must not allocate.
class StagePlaces {
 public:
  StagePlaces(const PruningRecord& record, int64_t n_seen);
  const size_t* begin() const { return places_.data(); }
  const size_t* end() const { return places_.data() + n_; }
  size_t size() const { return n_; }
  size_t operator[](size_t i) const { return places_[i]; }
  bool operator==(const StagePlaces&) const = default;

 private:
  std::array<size_t, kMostStages> places_{};
  size_t n_ = 0;
};

// The queries of one sequence in a call, and the keys of that sequence.
struct SearchedCall {
  const Backend* cpu = nullptr;
  const Layer* layer = nullptr;
  int32_t layer_idx = 0;
  const StoreView* stored = nullptr;
  std::span<const ChunkBounds> bounds;
  const PruningRecord* record = nullptr;
  bool shares_lists = false;
  const float* q = nullptr;  // [n_kv_heads][q_len][group_size][k_head_dim]
  int64_t q_len = 0;
  int64_t first_query = 0;  // token of the first query
  bool overlaps = false;    // lists also serve later calls, so candidates reach into the window
  bool is_guess = false;    // speculative: all blocks have the window and the candidates of the first query

  // Returns the token that determines window and candidates of the block that begins with this query.
  int64_t p0(int64_t query) const { return is_guess ? first_query : first_query + query; }

  int64_t n_lists() const { return shares_lists ? 1 : layer->n_kv_heads; }
  bool has_one_block() const;  // true if every stage has one block
};

// Returns how many stages run in a decode call: the first stage that is due after `before`, and all later ones.
size_t n_due_stages(const SearchedCall& call, const CachedLists& before);

// Returns the first token that is not a candidate, for a block whose first query is token p0.
int64_t candidates_end(const PruningRecord& record, int64_t p0, bool overlaps);

// The lists of a call's query blocks.
struct BlockLists {
  int64_t query_block = 1;              // queries of a block; the last may have fewer
  std::vector<int64_t> window_queries;  // [n_blocks] as QueryNames has them
  int64_t chunk_len = 1;                // tokens of a chunk in the lists
  std::vector<ChunkList> of_block;      // [n_blocks][n_lists]
};

class HipSearch {
 public:
  // Searches for all blocks of the call. Returns CANCELLED; throws bad_alloc, as search_cached() does.
  Status search(const SearchedCall& call, const Watch& watch, BlockLists* lists);
  // Returns the bytes of K and bounds that searches have read since the last call of this function. A descent counts the
  // bytes of one query head.
  int64_t take_judged_bytes() { return std::exchange(judged_bytes_, 0); }
  // Searches for one block of queries by running the last n_due_stages() stages. *ran gets the lists of these stages, which
  // the caller may cache.
  Status search_cached(const SearchedCall& call, const CachedLists& before, const Watch& watch, CachedLists* ran,
                       BlockLists* lists);

 private:
  struct Block {  // a stage's query block, for one list
    int64_t query = 0, n_queries = 0;
    int32_t list = 0;
    Candidates from;
    int64_t scores_at = 0;  // index in scores_ of this block's [KV heads of the list][from.n]
    ChunkList* kept = nullptr;
    int32_t n_left = 0;  // KV heads without scores; atomic
  };
  struct alignas(128) Scratch {  // a worker's; aligned so that workers share no cache line
    std::vector<KvRun> runs;
    std::vector<float> q, of_rows, of_low, of_high;
    std::vector<int32_t> low;
    std::vector<const void*> first_keys;
    RankScratch ranks;
  };
  struct Piece {                  // candidates of a block for one KV head; empty: the block is skipped
    int64_t block = 0, head = 0;  // indices in blocks_ and heads_
    int32_t kv_head = 0;
    int64_t begin = 0, end = 0;
    bool counts_rest = false;  // the sums of this piece include the keys of sinks and window
    // Where this piece stores its rows separately: row_scores_ [n_rows][end - begin] and row_sums_ [n_rows][2]. sums_at =
    // -1: it does not.
    int64_t rows_at = 0, sums_at = -1;
  };
  struct JudgedHead {  // a KV head of a block; its pieces are [first, first + n)
    int64_t first = 0, n = 0;
    int32_t n_left = 0;  // pieces not judged yet; atomic
  };

  Status search_range(int64_t query, int64_t n_queries, const StagePlaces& places, const Watch& watch, BlockLists* lists);
  Status run_stage(const PruningStage& stage, bool is_last, const Watch& watch);
  void add_blocks(const PruningStage& stage, const PruningStage* before, TokenRange queries,
                  const std::vector<ChunkList>& parents, std::vector<ChunkList>* kept);
  void write_list(const PruningStage* last, const ChunkList* kept, int64_t end, BlockLists* lists, size_t place) const;
  void cut_pieces();
  void cut_head(int64_t b, int32_t kv_head, int64_t n_wanted);
  void finish_piece(int64_t idx, const Watch& watch, int32_t worker_idx);
  void judge(const Piece& piece, Scratch& scratch, int32_t worker_idx);
  void judge_bounds(const Piece& piece, Scratch& scratch, int32_t worker_idx);
  void judge_exact(const Piece& piece, Scratch& scratch, int32_t worker_idx);
  void judge_descent(const Piece& piece, Scratch& scratch, int32_t worker_idx);
  void pool_rows(const JudgedHead& head);
  void finish_block(const Block& block, Scratch& scratch);
  void add_keys(TokenRange tokens, int32_t kv_head, std::vector<KvRun>* runs) const;
  int64_t add_rest(const Block& block, int32_t kv_head, std::vector<KvRun>* runs) const;
  bool point_at_chunks(const Piece& piece, Scratch& scratch) const;
  void descend_step_by_step(const Piece& piece, Scratch& scratch, int32_t worker_idx);
  void largest_of(const Piece& piece, int32_t head, Scratch& scratch, int32_t worker_idx, float* to) const;
  bool is_skipped(const Block& block) const { return block.from.n * stage_->chunk_len <= stage_->keep_len; }
  bool normalises() const {
    const Layer& layer = *call_->layer;
    return is_last_ && stage_->judge == Judge::kExact && (call_->shares_lists ? layer.n_q_heads : layer.group_size) > 1;
  }
  int64_t bytes_of_key() const;
  int64_t bytes_of_chunk() const;
  int64_t bytes_of(const Piece& piece) const;
  int64_t rows_of(const Block& block) const { return block.n_queries * call_->layer->group_size; }
  const float* queries_of(const Block& block, int32_t kv_head) const;
  float* scores_of(const Piece& piece);

  // The call in progress.
  const SearchedCall* call_ = nullptr;
  Layer bounded_;
  // The stage in progress.
  const PruningStage* stage_ = nullptr;
  bool is_last_ = false;
  std::vector<Block> blocks_;
  std::vector<Piece> pieces_;
  std::vector<JudgedHead> heads_;
  std::vector<float> scores_, row_scores_, row_sums_;
  int64_t n_row_scores_ = 0, n_row_sums_ = 0;
  std::vector<ChunkList> kept_, parents_;
  std::vector<Scratch> scratch_;  // [n_workers], reused by later calls
  int64_t judged_bytes_ = 0;
};

}  // namespace tandem
