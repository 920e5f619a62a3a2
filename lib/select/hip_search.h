// SPDX-License-Identifier: MIT
// The search for the chunks that query blocks attend (pruning.h of the ABI has the rules): stage after stage, for some
// blocks of a call at a time, on the pool.
//
// A stage has a task for each query block, KV head and piece of the block's candidates, which gives the candidates scores. A
// stage that normalises shifts a row's logits by their log-sum-exp, which is known when all pieces of the KV head are
// judged: pieces leave the largest logits of each row apart, and the worker that ends the last one joins them. The worker
// that ends the last piece of a block keeps the block's best, so that a stage is one round of the pool. Candidates of the
// first stage are a range, those of others are the parts of chunks that are listed.
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

// What decode calls keep of their stages.
struct CachedLists {
  struct Stage {
    size_t place = 0;                // in the record
    int64_t ran_at = 0;              // token of the query
    std::vector<ChunkList> of_list;  // [n_lists]
  };
  std::array<Stage, kMostStages> stages;  // the first n were there
  size_t n = 0;
  bool are_valid = false;

  // The call's n_stages stages, of which the last n_run have run, into `ran`.
  void take(CachedLists* ran, size_t n_stages, size_t n_run);
};

// Which stages of a record are there for a query. Takes no memory: decode calls of a length that has been reached take none.
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

// The queries of one sequence in a call, and its keys.
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
  int64_t first_query = 0;  // token of the first
  bool overlaps = false;    // lists are for later calls too: candidates reach into the window
  bool is_guess = false;    // all blocks have the window and the candidates of the first query

  // The token that decides what the block of a query looks at.
  int64_t p0(int64_t query) const { return is_guess ? first_query : first_query + query; }

  int64_t n_lists() const { return shares_lists ? 1 : layer->n_kv_heads; }
  bool has_one_block() const;  // in every stage
};

// How many stages run in a decode call: the first that is due after `before`, and all behind it.
size_t n_due_stages(const SearchedCall& call, const CachedLists& before);

// The first token that is no candidate, for a block whose first query is token p0.
int64_t candidates_end(const PruningRecord& record, int64_t p0, bool overlaps);

// The lists of a call's query blocks.
struct BlockLists {
  int64_t query_block = 1;              // queries of a block; the last may have fewer
  std::vector<int64_t> window_queries;  // [n_blocks] as QueryNames has them
  int64_t chunk_len = 1;                // of the lists' chunks
  std::vector<ChunkList> of_block;      // [n_blocks][n_lists]
};

class HipSearch {
 public:
  // All blocks of the call. CANCELLED. Throws bad_alloc, as search_cached() does.
  Status search(const SearchedCall& call, const Watch& watch, BlockLists* lists);
  // K, and bounds, that searches have read since this was asked last. A descent's are counted of one query head.
  int64_t take_judged_bytes() { return std::exchange(judged_bytes_, 0); }
  // One block of queries, whose last n_due_stages() stages run. *ran has them alone: to be cached.
  Status search_cached(const SearchedCall& call, const CachedLists& before, const Watch& watch, CachedLists* ran,
                       BlockLists* lists);

 private:
  struct Block {  // of a stage, for one list
    int64_t query = 0, n_queries = 0;
    int32_t list = 0;
    Candidates from;
    int64_t scores_at = 0;  // in scores_: [KV heads of the list][from.n]
    ChunkList* kept = nullptr;
    int32_t n_left = 0;  // KV heads that have no scores yet; atomic
  };
  struct alignas(128) Scratch {  // of a worker: no cache line is another one's
    std::vector<KvRun> runs;
    std::vector<float> q, of_rows, of_low, of_high;
    std::vector<int32_t> low;
    std::vector<const void*> first_keys;
    RankScratch ranks;
  };
  struct Piece {                  // of a block's candidates, for one KV head; empty: the block is skipped
    int64_t block = 0, head = 0;  // in blocks_ and heads_
    int32_t kv_head = 0;
    int64_t begin = 0, end = 0;
    bool counts_rest = false;  // sinks and window count in the sums of this piece
    // Where the piece leaves its rows apart: in row_scores_ [n_rows][end - begin], and in row_sums_ [n_rows][2].
    int64_t rows_at = 0, sums_at = -1;
  };
  struct JudgedHead {  // a KV head of a block: pieces [first, first + n)
    int64_t first = 0, n = 0;
    int32_t n_left = 0;  // pieces that are not judged yet; atomic
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

  // Of the call under way.
  const SearchedCall* call_ = nullptr;
  Layer bounded_;
  // Of the stage under way.
  const PruningStage* stage_ = nullptr;
  bool is_last_ = false;
  std::vector<Block> blocks_;
  std::vector<Piece> pieces_;
  std::vector<JudgedHead> heads_;
  std::vector<float> scores_, row_scores_, row_sums_;
  int64_t n_row_scores_ = 0, n_row_sums_ = 0;
  std::vector<ChunkList> kept_, parents_;
  std::vector<Scratch> scratch_;  // [n_workers]: kept from call to call
  int64_t judged_bytes_ = 0;
};

}  // namespace tandem
