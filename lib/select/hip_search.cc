// SPDX-License-Identifier: MIT
#include "lib/select/hip_search.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>

#include "lib/select/row_sums.h"
#include "lib/store/cache_rows.h"

namespace tandem {
namespace {

constexpr int64_t kBatchQueries = 512;       // queries of a call that are searched together
constexpr int64_t kWantedPieces = 64;        // pieces of a stage: usually a few for each core of a processor
constexpr int64_t kLeastOfPiece = 32 << 10;  // bytes: some microseconds of work, enough to justify the hand-over of a piece

const PruningStage& finest(const PruningRecord& record) {
  return *std::min_element(record.stages.begin(), record.stages.end(),
                           [](const auto& a, const auto& b) { return a.chunk_len < b.chunk_len; });
}

// A call's lists have the smallest query blocks and the finest chunks of all stages, active or not.
void set_blocks(const SearchedCall& call, BlockLists* lists) {
  const PruningRecord& record = *call.record;
  lists->query_block = record.stages[0].query_block;
  for (const PruningStage& stage : record.stages) lists->query_block = std::min(lists->query_block, stage.query_block);
  lists->chunk_len = finest(record).chunk_len;
  const int64_t n_blocks = (call.q_len + lists->query_block - 1) / lists->query_block;
  lists->of_block.resize(static_cast<size_t>(n_blocks * call.n_lists()));
  lists->window_queries.assign(static_cast<size_t>(n_blocks), 0);
}

// Splits chunks of whole_len tokens into parts of chunk_len tokens, without parts that begin at `end` or later.
void split_chunks(const ChunkList& whole, int64_t whole_len, int64_t chunk_len, int64_t end, ChunkList* parts) {
  const int64_t n = whole_len / chunk_len;
  const auto is_before_end = [&](int32_t chunk) { return chunk * chunk_len < end; };
  if (n == 1) return parts->assign(whole.begin(), std::partition_point(whole.begin(), whole.end(), is_before_end));
  parts->clear();
  for (const int32_t chunk : whole)
    for (int64_t part = chunk * n; part < (chunk + 1) * n && part * chunk_len < end; ++part)
      parts->push_back(static_cast<int32_t>(part));
}

// Returns the most chunks that an active stage judges for a query behind n_tokens tokens. A later stage may judge more
// chunks than the first one, because its chunks are shorter.
int64_t most_candidates(const PruningRecord& record, const StagePlaces& places, int64_t n_tokens) {
  int64_t most = 1;
  for (size_t i = 0; i < places.size(); ++i) {
    const PruningStage& stage = record.stages[places[i]];
    most = std::max(most, n_tokens / stage.chunk_len + 1);
    n_tokens = std::min(n_tokens, stage.keep_len);
  }
  return most;
}

}  // namespace

StagePlaces::StagePlaces(const PruningRecord& record, int64_t n_seen) {
  for (size_t i = 0; i < record.stages.size(); ++i)
    if (record.stages[i].is_there(n_seen)) places_[n_++] = i;
}

int64_t candidates_end(const PruningRecord& record, int64_t p0, bool overlaps) {
  int64_t overlap = 0;
  for (const PruningStage& stage : record.stages)
    if (overlaps && stage.is_there(p0 + 1)) overlap = std::max(overlap, stage.interval - 1);
  return p0 + 1 - record.window_len + overlap;
}

void CachedLists::take(CachedLists* ran, size_t n_stages, size_t n_run) {
  for (size_t i = n_stages - n_run; i < n_stages; ++i) std::swap(stages[i], ran->stages[i]);
  n = n_stages;
  are_valid = true;
}

size_t n_due_stages(const SearchedCall& call, const CachedLists& before) {
  const StagePlaces places(*call.record, call.first_query + 1);
  if (!before.are_valid || before.n != places.size()) return places.size();
  for (size_t i = 0; i < places.size(); ++i)
    if (before.stages[i].place != places[i]) return places.size();
  for (size_t i = 0; i < places.size(); ++i)
    if (call.first_query - before.stages[i].ran_at >= call.record->stages[places[i]].interval) return places.size() - i;
  return 0;
}

bool SearchedCall::has_one_block() const {
  return std::all_of(record->stages.begin(), record->stages.end(),
                     [&](const PruningStage& stage) { return q_len <= stage.query_block; });
}

const float* HipSearch::queries_of(const Block& block, int32_t kv_head) const {
  const Layer& layer = *call_->layer;
  return call_->q + (kv_head * call_->q_len + block.query) * layer.group_size * layer.k_head_dim;
}

float* HipSearch::scores_of(const Piece& piece) {
  const Block& block = blocks_[static_cast<size_t>(piece.block)];
  const int64_t head = call_->shares_lists ? piece.kv_head : 0;
  return scores_.data() + block.scores_at + head * block.from.n + piece.begin;
}

// Adds the blocks of a stage. Blocks of the first stage (before is null) have all chunks as candidates. Other blocks have
// the parts of the chunks that the stage before has kept for the same queries.
void HipSearch::add_blocks(const PruningStage& stage, const PruningStage* before, TokenRange queries,
                           const std::vector<ChunkList>& parents, std::vector<ChunkList>* kept) {
  const int64_t n_lists = call_->n_lists(), len = stage.chunk_len;
  blocks_.clear();
  for (int64_t query = queries.begin; query < queries.end; query += stage.query_block)
    for (int32_t list = 0; list < n_lists; ++list) {
      Block block;
      block.query = query;
      block.n_queries = std::min(stage.query_block, queries.end - query);
      block.list = list;
      const int64_t end = candidates_end(*call_->record, call_->p0(query), call_->overlaps);
      if (before == nullptr) {
        block.from.first = call_->record->sink_len / len;
        block.from.n = std::max<int64_t>(0, (end + len - 1) / len - block.from.first);
      } else {
        const int64_t parent = (query - queries.begin) / before->query_block;
        const ChunkList& listed = parents[static_cast<size_t>(parent * n_lists + list)];
        block.from.listed = listed.data();
        block.from.part_shift = std::countr_zero(static_cast<uint64_t>(before->chunk_len / len));
        block.from.n = std::ssize(listed) << block.from.part_shift;
        while (block.from.n > 0 && block.from.chunk(block.from.n - 1) * len >= end) --block.from.n;
      }
      block.kept = &(*kept)[blocks_.size()];
      blocks_.push_back(block);
    }
}

// Cuts a block's candidates for one KV head into pieces. If the stage normalises, has few KV heads to judge and few rows for
// each, pieces store these rows' largest logits until all pieces of the KV head are judged. Sinks and window then are a
// piece of their own. Many rows would have too many numbers to store. They get one piece for each KV head, which the kernel
// normalises. Such calls have enough blocks to keep all workers busy.
void HipSearch::cut_head(int64_t b, int32_t kv_head, int64_t n_wanted) {
  const Block& block = blocks_[static_cast<size_t>(b)];
  const int64_t n = block.from.n, n_rows = rows_of(block);
  const bool are_apart = normalises() && n_wanted > 1 && n_rows <= kJudgedRows;
  Piece piece{.block = b, .head = std::ssize(heads_), .kv_head = kv_head};
  const auto add = [&](int64_t begin, int64_t end) {
    piece.begin = begin, piece.end = end;
    if (are_apart) {
      piece.rows_at = std::exchange(n_row_scores_, n_row_scores_ + n_rows * (end - begin));
      piece.sums_at = std::exchange(n_row_sums_, n_row_sums_ + 2 * n_rows);
    }
    pieces_.push_back(piece);
  };
  const int64_t first = std::ssize(pieces_), n_cut = normalises() && !are_apart ? 1 : n_wanted - (are_apart ? 1 : 0);
  const int64_t n_pieces = std::clamp<int64_t>(n * bytes_of_chunk() / kLeastOfPiece, 1, std::clamp<int64_t>(n_cut, 1, n));
  piece.counts_rest = normalises() && !are_apart;
  for (int64_t p = 0; p < n_pieces; ++p) add(n * p / n_pieces, n * (p + 1) / n_pieces);
  piece.counts_rest = true;
  if (are_apart) add(n, n);
  heads_.push_back({first, std::ssize(pieces_) - first, static_cast<int32_t>(std::ssize(pieces_) - first)});
}

void HipSearch::cut_pieces() {
  pieces_.clear();
  heads_.clear();
  n_row_scores_ = n_row_sums_ = 0;
  int64_t n_scores = 0, n_judged = 0;
  const int32_t n_heads = call_->shares_lists ? call_->layer->n_kv_heads : 1;
  for (Block& block : blocks_) {
    if (is_skipped(block)) continue;
    block.scores_at = n_scores;
    n_scores += block.from.n * n_heads;
    n_judged += n_heads;
  }
  scores_.resize(static_cast<size_t>(n_scores));
  const int64_t n_wanted = (kWantedPieces + n_judged - 1) / std::max<int64_t>(1, n_judged);
  for (int64_t b = 0; b < std::ssize(blocks_); ++b) {
    Block& block = blocks_[static_cast<size_t>(b)];
    block.n_left = is_skipped(block) ? 1 : n_heads;
    if (is_skipped(block)) {
      pieces_.push_back({.block = b, .head = std::ssize(heads_)});
      heads_.push_back({std::ssize(pieces_) - 1, 1, 1});
      continue;
    }
    for (int32_t h = 0; h < n_heads; ++h) cut_head(b, call_->shares_lists ? h : block.list, n_wanted);
  }
  row_scores_.resize(static_cast<size_t>(n_row_scores_));
  row_sums_.resize(static_cast<size_t>(n_row_sums_));
  const auto n_workers = static_cast<size_t>(call_->cpu->table->n_workers(call_->cpu->self));
  if (scratch_.size() < n_workers) scratch_.resize(n_workers);
}

int64_t HipSearch::bytes_of_key() const {
  const Layer& layer = *call_->layer;
  return row_bytes(layer.k_type, layer.k_head_dim) + scale_bytes(layer.k_type, layer.k_head_dim);
}

int64_t HipSearch::bytes_of_chunk() const {
  const int64_t len = stage_->chunk_len;
  switch (stage_->judge) {
    case Judge::kBounds:
      return row_bytes(bounded_.k_type, bounded_.k_head_dim);
    case Judge::kExact:
      return len * bytes_of_key();
    case Judge::kDescent:
      return (1 + std::countr_zero(static_cast<uint64_t>(len))) * bytes_of_key();
  }
  return 0;
}

int64_t HipSearch::bytes_of(const Piece& piece) const {
  const int64_t n_beside = piece.counts_rest ? call_->record->sink_len + call_->record->window_len : 0;
  return (piece.end - piece.begin) * bytes_of_chunk() + n_beside * bytes_of_key();
}

void HipSearch::add_keys(TokenRange tokens, int32_t kv_head, std::vector<KvRun>* runs) const {
  for (int64_t t = tokens.begin; t < tokens.end; t += runs->back().n_tokens)
    runs->push_back(keys_of(*call_->stored, *call_->layer, call_->layer_idx,
                            key_tokens(*call_->stored, *call_->layer, {t, tokens.end}), kv_head));
}

void HipSearch::judge_bounds(const Piece& piece, Scratch& scratch, int32_t worker_idx) {
  const Block& block = blocks_[static_cast<size_t>(piece.block)];
  const Layer& layer = *call_->layer;
  const ChunkBounds& bounds = *std::find_if(call_->bounds.begin(), call_->bounds.end(),
                                            [&](const ChunkBounds& of) { return of.chunk_len() == stage_->chunk_len; });
  scratch.q.resize(static_cast<size_t>(rows_of(block) * 2 * layer.k_head_dim));
  bounded_queries(queries_of(block, piece.kv_head), rows_of(block), layer.k_head_dim, scratch.q.data());
  scratch.runs.clear();
  for (int64_t i = piece.begin; i < piece.end; i += scratch.runs.back().n_tokens) {
    const int64_t n = block.from.n_following(i, piece.end);
    scratch.runs.push_back(bounds.run(layer, piece.kv_head, block.from.chunk(i), n));
  }
  ChunkJob job;
  job.layer = &bounded_;
  job.q = scratch.q.data();
  job.n_rows = static_cast<int32_t>(rows_of(block));
  job.runs = scratch.runs.data();
  job.n_keys = job.n_chunks = piece.end - piece.begin;
  job.largest = scores_of(piece);
  call_->cpu->table->judge_chunks(call_->cpu->self, job, worker_idx);
}

// Adds the other keys that the block attends: sinks and window, each token once. Returns their number.
int64_t HipSearch::add_rest(const Block& block, int32_t kv_head, std::vector<KvRun>* runs) const {
  const int64_t len = stage_->chunk_len, p0 = call_->p0(block.query), sink_len = call_->record->sink_len;
  const int64_t window = std::max(sink_len, p0 + 1 - call_->record->window_len);
  int64_t n_keys = 0, newest = window;
  const auto count = [&](int64_t begin, int64_t end) {
    if (begin >= end) return;
    add_keys({begin, end}, kv_head, runs);
    n_keys += end - begin;
  };
  count(0, std::min(sink_len, p0 + 1));
  for (int64_t i = 0; i < block.from.n; ++i) {
    const int64_t first = block.from.chunk(i) * len;
    if (first + len <= window) continue;
    count(newest, first);
    newest = std::max(newest, first + len);
  }
  count(newest, p0 + 1);
  return n_keys;
}

// With normalising, these other keys count in the sums.
void HipSearch::judge_exact(const Piece& piece, Scratch& scratch, int32_t worker_idx) {
  const Block& block = blocks_[static_cast<size_t>(piece.block)];
  const int64_t len = stage_->chunk_len, n = piece.end - piece.begin;
  scratch.runs.clear();
  for (int64_t i = piece.begin; i < piece.end;) {
    const int64_t first = block.from.chunk(i), n_side_by_side = block.from.n_following(i, piece.end);
    add_keys({first * len, (first + n_side_by_side) * len}, piece.kv_head, &scratch.runs);
    i += n_side_by_side;
  }
  ChunkJob job;
  job.n_keys = n * len + (piece.counts_rest ? add_rest(block, piece.kv_head, &scratch.runs) : 0);
  job.layer = call_->layer;
  job.q = queries_of(block, piece.kv_head);
  job.n_rows = static_cast<int32_t>(rows_of(block));
  job.runs = scratch.runs.data();
  job.chunk_keys = len;
  job.n_chunks = n;
  job.normalises = normalises();
  if (piece.sums_at >= 0) {
    job.row_largest = row_scores_.data() + piece.rows_at;
    job.row_sums = row_sums_.data() + piece.sums_at;
  } else if (normalises()) {
    scratch.of_rows.resize(static_cast<size_t>(std::min<int64_t>(kJudgedRows, rows_of(block)) * n));
    job.row_largest = scratch.of_rows.data();
  }
  job.largest = scores_of(piece);
  call_->cpu->table->judge_chunks(call_->cpu->self, job, worker_idx);
}

// Computes the scores of a KV head whose pieces have stored their rows. Joins the sums in the order of the pieces, so the
// result does not depend on which piece ended last.
void HipSearch::pool_rows(const JudgedHead& head) {
  const std::span pieces = std::span(pieces_).subspan(static_cast<size_t>(head.first), static_cast<size_t>(head.n));
  const int64_t n_rows = rows_of(blocks_[static_cast<size_t>(pieces[0].block)]);
  for (const Piece& piece : pieces) std::fill_n(scores_of(piece), piece.end - piece.begin, -INFINITY);
  for (int64_t r = 0; r < n_rows; ++r) {
    const float shift = log_sum({row_sums_.data() + pieces[0].sums_at + 2 * r, head.n, 2 * n_rows});
    if (shift == -INFINITY) continue;  // no logit of the row is finite: a query with NaN chooses nothing
    for (const Piece& piece : pieces) {
      const int64_t n = piece.end - piece.begin;
      raise_scores({row_scores_.data() + piece.rows_at + r * n, static_cast<size_t>(n)}, shift, scores_of(piece));
    }
  }
}

// Computes, for each chunk of the piece, the largest logit of a query head's rows at one key: the key at the chunk's offset
// in scratch.low.
void HipSearch::largest_of(const Piece& piece, int32_t head, Scratch& scratch, int32_t worker_idx, float* to) const {
  const Block& block = blocks_[static_cast<size_t>(piece.block)];
  scratch.runs.clear();
  for (int64_t i = piece.begin; i < piece.end; ++i) {
    const int64_t token = block.from.chunk(i) * stage_->chunk_len + scratch.low[static_cast<size_t>(i - piece.begin)];
    add_keys({token, token + 1}, piece.kv_head, &scratch.runs);
  }
  ChunkJob job;
  job.layer = call_->layer;
  job.q = scratch.q.data() + head * block.n_queries * call_->layer->k_head_dim;
  job.n_rows = static_cast<int32_t>(block.n_queries);
  job.runs = scratch.runs.data();
  job.n_keys = job.n_chunks = piece.end - piece.begin;
  job.largest = to;
  call_->cpu->table->judge_chunks(call_->cpu->self, job, worker_idx);
}

// Finds the first key of each chunk of the piece. Returns false where the kernel cannot descend from it: it needs chunks
// whose keys are contiguous and are read as stored.
bool HipSearch::point_at_chunks(const Piece& piece, Scratch& scratch) const {
  const Layer& layer = *call_->layer;
  if (layer.rope != nullptr || scale_bytes(layer.k_type, layer.k_head_dim) > 0) return false;
  const Block& block = blocks_[static_cast<size_t>(piece.block)];
  scratch.first_keys.clear();
  for (int64_t i = piece.begin; i < piece.end; ++i) {
    const int64_t token = block.from.chunk(i) * stage_->chunk_len;
    const TokenRun at = key_tokens(*call_->stored, layer, {token, token + stage_->chunk_len});
    if (at.n < stage_->chunk_len) return false;
    scratch.first_keys.push_back(keys_of(*call_->stored, layer, call_->layer_idx, at, piece.kv_head).k);
  }
  return true;
}

// Each query head descends separately, so its rows are made contiguous.
void HipSearch::judge_descent(const Piece& piece, Scratch& scratch, int32_t worker_idx) {
  const Block& block = blocks_[static_cast<size_t>(piece.block)];
  const auto dim = static_cast<size_t>(call_->layer->k_head_dim), group = static_cast<size_t>(call_->layer->group_size);
  const auto n_queries = static_cast<size_t>(block.n_queries);
  const float* const q = queries_of(block, piece.kv_head);
  scratch.q.resize(group * n_queries * dim);
  for (size_t g = 0; g < group; ++g)
    for (size_t t = 0; t < n_queries; ++t)
      std::copy_n(q + (t * group + g) * dim, dim, scratch.q.data() + (g * n_queries + t) * dim);
  if (!point_at_chunks(piece, scratch)) return descend_step_by_step(piece, scratch, worker_idx);
  DescentJob job;
  job.layer = call_->layer;
  job.q = scratch.q.data();
  job.n_heads = call_->layer->group_size;
  job.n_rows = static_cast<int32_t>(block.n_queries);
  job.first_keys = scratch.first_keys.data();
  job.chunk_keys = stage_->chunk_len;
  job.n_chunks = piece.end - piece.begin;
  job.largest = scores_of(piece);
  call_->cpu->table->descend_chunks(call_->cpu->self, job, worker_idx);
}

// Does the same for keys that are not contiguous or not read as stored. The step before has computed the logit of the first
// half's first key.
void HipSearch::descend_step_by_step(const Piece& piece, Scratch& scratch, int32_t worker_idx) {
  const auto n = static_cast<size_t>(piece.end - piece.begin);
  float* const scores = scores_of(piece);
  std::fill_n(scores, n, -INFINITY);
  scratch.of_low.resize(n);
  scratch.of_high.resize(n);
  for (int32_t g = 0; g < call_->layer->group_size; ++g) {
    scratch.low.assign(n, 0);
    largest_of(piece, g, scratch, worker_idx, scratch.of_low.data());
    for (auto half = static_cast<int32_t>(stage_->chunk_len / 2); half > 0; half /= 2) {
      for (int32_t& low : scratch.low) low += half;
      largest_of(piece, g, scratch, worker_idx, scratch.of_high.data());
      for (size_t i = 0; i < n; ++i) {
        if (scratch.of_high[i] > scratch.of_low[i])
          scratch.of_low[i] = scratch.of_high[i];
        else
          scratch.low[i] -= half;
      }
    }
    for (size_t i = 0; i < n; ++i) scores[i] = std::max(scores[i], scratch.of_low[i]);
  }
}

void HipSearch::judge(const Piece& piece, Scratch& scratch, int32_t worker_idx) {
  switch (stage_->judge) {
    case Judge::kBounds:
      return judge_bounds(piece, scratch, worker_idx);
    case Judge::kExact:
      return judge_exact(piece, scratch, worker_idx);
    case Judge::kDescent:
      return judge_descent(piece, scratch, worker_idx);
  }
}

void HipSearch::finish_block(const Block& block, Scratch& scratch) {
  ChunkList& kept = *block.kept;
  if (is_skipped(block)) {
    kept.clear();
    for (int64_t i = 0; i < block.from.n; ++i) kept.push_back(static_cast<int32_t>(block.from.chunk(i)));
    return;
  }
  const int64_t len = stage_->chunk_len, end = candidates_end(*call_->record, call_->p0(block.query), call_->overlaps);
  ScoredCandidates of{block.from};
  of.scores = scores_.data() + block.scores_at;
  of.n_heads = call_->shares_lists ? call_->layer->n_kv_heads : 1;
  of.n_kept = stage_->keep_len / (stage_->plus_next ? 2 * len : len);
  of.plus_next = stage_->plus_next;
  of.chunks_end = (end + len - 1) / len;
  keep_best(of, scratch.ranks, &kept);
}

// The worker that finishes the last piece of a KV head computes the head's scores. The worker that finishes the last head of
// a block keeps the block's best chunks.
void HipSearch::finish_piece(int64_t idx, const Watch& watch, int32_t worker_idx) {
  if (watch.is_cancelled()) return;
  const Piece& piece = pieces_[static_cast<size_t>(idx)];
  JudgedHead& head = heads_[static_cast<size_t>(piece.head)];
  Block& block = blocks_[static_cast<size_t>(piece.block)];
  Scratch& scratch = scratch_[static_cast<size_t>(worker_idx)];
  const auto is_last = [](int32_t& n_left) { return std::atomic_ref(n_left).fetch_sub(1, std::memory_order_acq_rel) == 1; };
  if (piece.begin < piece.end || piece.counts_rest) judge(piece, scratch, worker_idx);
  if (!is_last(head.n_left)) return;
  if (piece.sums_at >= 0) pool_rows(head);
  if (is_last(block.n_left)) finish_block(block, scratch);
}

Status HipSearch::run_stage(const PruningStage& stage, bool is_last, const Watch& watch) {
  stage_ = &stage;
  is_last_ = is_last;
  cut_pieces();
  struct Run {
    HipSearch& search;
    const Watch& watch;
  } run{*this, watch};
  const auto finish_one = [](void* of, int64_t idx, int32_t worker_idx) {
    const Run& all = *static_cast<const Run*>(of);
    all.search.finish_piece(idx, all.watch, worker_idx);
  };
  const BackendTable& cpu = *call_->cpu->table;
  for (const Piece& piece : pieces_) judged_bytes_ += bytes_of(piece);
  if (scores_.empty())  // all blocks are skipped
    for (int64_t i = 0; i < std::ssize(pieces_); ++i) finish_one(&run, i, 0);
  else
    cpu.run_alone(call_->cpu->self, std::ssize(pieces_), finish_one, &run);
  return watch.check();
}

// Writes the chunks that the last stage has kept, in the call's finest chunks. If no stage is active (last is null), writes
// all chunks between sinks and window.
void HipSearch::write_list(const PruningStage* last, const ChunkList* kept, int64_t end, BlockLists* lists,
                           size_t place) const {
  ChunkList& to = lists->of_block[place];
  if (last != nullptr) return split_chunks(*kept, last->chunk_len, lists->chunk_len, end, &to);
  to.clear();
  for (int64_t chunk = call_->record->sink_len / lists->chunk_len; chunk * lists->chunk_len < end; ++chunk)
    to.push_back(static_cast<int32_t>(chunk));
}

// Searches for queries [query, query + n_queries), which all have the same active stages.
Status HipSearch::search_range(int64_t query, int64_t n_queries, const StagePlaces& places, const Watch& watch,
                               BlockLists* lists) {
  const PruningRecord& record = *call_->record;
  const auto n_lists = static_cast<size_t>(call_->n_lists());
  const PruningStage* before = nullptr;
  for (const size_t place : places) {
    const PruningStage& stage = record.stages[place];
    const auto n_blocks = static_cast<size_t>((n_queries + stage.query_block - 1) / stage.query_block) * n_lists;
    parents_.swap(kept_);
    if (kept_.size() < n_blocks) kept_.resize(n_blocks);
    add_blocks(stage, before, {query, query + n_queries}, parents_, &kept_);
    TANDEM_TRY(run_stage(stage, place == places[places.size() - 1], watch));
    before = &stage;
  }
  for (int64_t t = 0; t < n_queries; t += lists->query_block)
    for (size_t list = 0; list < n_lists; ++list) {
      const int64_t end = candidates_end(record, call_->p0(query + t), call_->overlaps);
      const auto block = static_cast<size_t>((query + t) / lists->query_block);
      const int64_t outer = places.size() > 0 ? record.stages[places[0]].query_block : kMostQueryBlock;
      lists->window_queries[block] = call_->is_guess ? 0 : query + t / outer * outer;
      const ChunkList* const kept =
          before == nullptr ? nullptr : &kept_[static_cast<size_t>(t / before->query_block) * n_lists + list];
      write_list(before, kept, end, lists, block * n_lists + list);
    }
  return {};
}

// Blocks of the first active stage follow each other from the call's first query on. The first query of a block decides
// which stages are active. Blocks with the same active stages are searched together, up to a limit.
Status HipSearch::search(const SearchedCall& call, const Watch& watch, BlockLists* lists) {
  constexpr int64_t kMostScores = int64_t{1} << 22;  // scores of blocks that are searched together
  call_ = &call;
  bounded_ = bounded_layer(*call.layer);
  const PruningRecord& record = *call.record;
  set_blocks(call, lists);
  for (int64_t query = 0; query < call.q_len;) {
    const StagePlaces places(record, call.p0(query) + 1);
    const bool has_stage = places.size() > 0;
    const int64_t block = has_stage ? record.stages[places[0]].query_block : kMostQueryBlock;
    const int64_t n_chunks = most_candidates(record, places, call.first_query + query);
    const int64_t n_most = std::max<int64_t>(1, kMostScores / (n_chunks * call.layer->n_kv_heads)) * block;
    const int64_t most = query + std::min(kBatchQueries, n_most);
    int64_t end = query;
    while (end < call.q_len && end < most && StagePlaces(record, call.p0(end) + 1) == places)
      end = std::min(call.q_len, end + block);
    TANDEM_TRY(search_range(query, end - query, places, watch, lists));
    query = end;
  }
  return {};
}

Status HipSearch::search_cached(const SearchedCall& call, const CachedLists& before, const Watch& watch, CachedLists* ran,
                                BlockLists* lists) {
  call_ = &call;
  bounded_ = bounded_layer(*call.layer);
  const PruningRecord& record = *call.record;
  const int64_t p0 = call.first_query, n_lists = call.n_lists();
  const StagePlaces places(record, p0 + 1);
  const size_t first_due = places.size() - n_due_stages(call, before);
  const auto lists_of = [&](size_t i) -> const std::vector<ChunkList>& {
    return (i < first_due ? before : *ran).stages[i].of_list;
  };
  for (size_t i = first_due; i < places.size(); ++i) {
    const PruningStage& stage = record.stages[places[i]];
    CachedLists::Stage& to = ran->stages[i];
    to.place = places[i];
    to.ran_at = p0;
    to.of_list.resize(static_cast<size_t>(n_lists));
    const PruningStage* const stage_before = i == 0 ? nullptr : &record.stages[places[i - 1]];
    add_blocks(stage, stage_before, {0, call.q_len}, i == 0 ? kept_ : lists_of(i - 1), &to.of_list);
    TANDEM_TRY(run_stage(stage, i + 1 == places.size(), watch));
  }
  set_blocks(call, lists);
  const PruningStage* const last = places.size() == 0 ? nullptr : &record.stages[places[places.size() - 1]];
  for (size_t list = 0; list < static_cast<size_t>(n_lists); ++list)
    write_list(last, last == nullptr ? nullptr : &lists_of(places.size() - 1)[list],
               candidates_end(record, p0, call.overlaps), lists, list);
  return {};
}

}  // namespace tandem
