// SPDX-License-Identifier: MIT
#include "lib/call/named_jobs.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "lib/machine/placement.h"

namespace tandem {
namespace {

constexpr int64_t kMostRuns = int64_t{1} << 17;  // of a batch: about 10 MB. A job that may need more is a batch of its own
constexpr int64_t kMostJobs = 4096;

}  // namespace

void NamedJobs::begin(const Facts& facts, std::span<const SequenceCall> calls) {
  facts_ = facts;
  unrotated_ = *facts.layer;
  unrotated_.rope = nullptr;
  calls_ = calls;
  call_ = 0;
  query_ = 0;
  kv_head_ = 0;
  n_done_ = n_outside_ = n_resident_ = 0;
}

void NamedJobs::begin_brought(Facts facts, const HostSlot& slot, std::span<const SequenceCall> calls) {
  const SlotHeader& header = header_of(slot);
  brought_ = {};
  brought_.idx = reinterpret_cast<const int32_t*>(slot.data + slot.exchange.idx_at);
  brought_.head_stride = brought_.n_idx = header.n_idx;
  brought_.token_stride = int64_t{header.idx_heads} * header.n_idx;
  brought_.n_heads = header.idx_heads;
  brought_.unit_shift = header.unit_shift;
  brought_.plus_window = header.plus_window != 0;
  facts.named = &brought_;
  begin(facts, calls);
}

int64_t NamedJobs::n_jobs() const {
  int64_t n = 0;
  for (const SequenceCall& call : calls_) {
    const int64_t of_block = names_of(call).query_block;
    for (int64_t t = 0; t < call.q_len && has_jobs(call); t += of_block)
      n += facts_.layer->n_kv_heads * (has_capped_job(call, t, std::min(of_block, call.q_len - t)) ? 2 : 1);
  }
  return n;
}

QueryNames NamedJobs::names_of(const SequenceCall& call) const {
  if (facts_.named == nullptr) return *call.state->selection->names();
  return {*facts_.named, call.first_row, 1, nullptr, facts_.sink_len, facts_.window_len};
}

// Returns an upper bound of a job's runs. A range is split where a page ends, or where positions are not consecutive.
int64_t NamedJobs::most_runs(size_t call, int64_t query, int32_t head) const {
  const SequenceCall& of = calls_[call];
  const QueryNames names = names_of(of);
  const int64_t page_len = views_[call].page_len, unit = int64_t{1} << names.keys.unit_shift;
  const bool by_position = facts_.layer->rope != nullptr && !views_[call].positions.empty();
  const bool in_tree = of.visibility.tree_words > 0;
  const int64_t of_unit = by_position || in_tree ? unit : (unit + page_len - 1) / page_len + 1;
  int64_t n = std::ssize(names.row(query, head)) * of_unit;
  const int64_t n_added = names.rows != nullptr ? of.length : names.sink_len + names.window_len + 2 * kMostQueryBlock;
  if (names.keys.plus_window) n += by_position ? n_added : n_added / page_len + 4;
  return std::min(n + (in_tree ? of.q_len : 0), of.length);
}

SeenTokens NamedJobs::seen_by(const SequenceCall& call, const QueryNames& names, const HeadQueries& of) const {
  SeenTokens seen;
  seen.own = call.first_query + of.query + of.n_queries - 1;
  seen.begin = call.visibility.begin[of.query];
  int64_t newest = call.first_query + names.window_query(of.query);  // its index in its chain of tokens
  if (call.visibility.tree_words > 0) {
    seen.tree_begin = call.visibility.tree_begin;
    seen.tree_bits = call.visibility.tree_bits + of.query * call.visibility.tree_words;
    int64_t n_ancestors = 0;
    for (int32_t w = 0; w < call.visibility.tree_words; ++w) n_ancestors += std::popcount(seen.tree_bits[w]);
    newest = call.first_query + n_ancestors - 1;
  }
  if (!names.keys.plus_window) return seen;
  seen.sink_end = facts_.layer->sliding_window > 0 ? 0 : names.sink_len;
  seen.newest_begin = names.newest_begin(of.query, of.kv_head, newest);
  seen.n_first_ancestors = std::max<int64_t>(0, seen.sink_end - call.first_query);
  seen.n_newest_ancestors = names.window_len;
  return seen;
}

// Returns the tokens in the window. On a device, speculative tokens are not in it.
TokenRange NamedJobs::window_of(const SequenceCall& call) const {
  return {call.resident_begin, facts_.on_device && facts_.is_speculative ? call.first_query : call.length};
}

int64_t NamedJobs::n_in_window(const SequenceCall& call, TokenRange tokens) const {
  const TokenRange window = window_of(call);
  return std::max<int64_t>(0, std::min(tokens.end, window.end) - std::max(tokens.begin, window.begin));
}

// Visits the tokens that the queries attend. On a device, a wrong row has none.
template <typename Visit>
void NamedJobs::for_tokens(const SequenceCall& call, const HeadQueries& of, Visit visit) const {
  const QueryNames names = names_of(call);
  const std::span<const int32_t> row = names.row(of.query, of.kv_head);
  const SeenTokens seen = seen_by(call, names, of);
  if (facts_.on_device && first_wrong(row, names.keys.unit_shift, seen.own) >= 0) return;
  for_named_tokens(names.keys, row, seen, visit);
}

// Adds the runs of `tokens`. On a device, the device attends the tokens in the window, so they get no runs.
void NamedJobs::add_runs(TokenRange tokens, Job* job) {
  const SequenceCall& call = calls_[job->call];
  const StoreView& view = views_[job->call];
  const TokenRange window = window_of(call);
  const int64_t n_resident = n_in_window(call, tokens);
  job->n_resident += n_resident;
  if (facts_.on_device && n_resident > 0) {
    if (tokens.begin < window.begin) add_runs({tokens.begin, window.begin}, job);
    if (tokens.end > window.end) add_runs({window.end, tokens.end}, job);
    return;
  }
  for (int64_t t = tokens.begin; t < tokens.end;) {
    const TokenRun at = first_tokens(call, view, layer_of(*job), {t, tokens.end});
    runs_[job->first_run + job->n_runs++] =
        run_of(call, view, layer_of(*job), facts_.layer_idx, at, job->kv_head / facts_.heads_per_kv);
    t += at.n;
  }
  job->n_keys += tokens.end - tokens.begin;
}

void NamedJobs::fill(Job* job) {
  const SequenceCall& call = calls_[job->call];
  // A key that is capped for only some of the block's queries is in both jobs. Each query sees it in one of them.
  TokenRange keys{0, call.length};
  job->visibility.begin = call.visibility.begin + job->query;
  job->visibility.end = call.visibility.end + job->query;
  if (job->is_capped) {
    job->visibility.end = call.capped.end + job->query;
    keys.end = job->visibility.end[job->n_queries - 1];
  } else if (call.capped.any) {
    job->visibility.begin = call.capped.end + job->query;  // a layer that follows patterns has no sliding window
    keys.begin = *job->visibility.begin;
  }
  for_tokens(call, {job->query, job->n_queries, job->kv_head}, [&](TokenRange tokens) {
    const TokenRange own{std::max(tokens.begin, keys.begin), std::min(tokens.end, keys.end)};
    if (own.begin < own.end) add_runs(own, job);
  });
}

void NamedJobs::note() {
  for (const SequenceCall& call : calls_) {
    const QueryNames names = names_of(call);
    for (int64_t t = 0; t < call.q_len && !has_jobs(call); ++t)
      for (int32_t h = 0; h < facts_.layer->n_kv_heads; ++h)
        for_tokens(call, {t, 1, h}, [&](TokenRange tokens) { n_resident_ += n_in_window(call, tokens); });
    if (facts_.is_speculative) continue;
    const int64_t last = (call.q_len - 1) / names.query_block * names.query_block;
    const SeenTokens seen = seen_by(call, names, {last, call.q_len - last, 0});
    call.state[facts_.n_ahead].named.note(names, last, seen, call.visibility.tree_words, !facts_.on_device);
  }
}

AttendJob NamedJobs::attend_job(const Job& job) const {
  const Layer& layer = layer_of(job);
  const SequenceCall& call = calls_[job.call];
  const int64_t first = (job.kv_head * call.q_len + job.query) * layer.group_size;
  AttendJob made;
  made.layer = &layer;
  made.n_rows = static_cast<int32_t>(job.n_queries * layer.group_size);
  made.q_is_bf16 = facts_.q_is_bf16 && facts_.layer->rope == nullptr && layer.k_rotation == TANDEM_ROTATION_NONE;
  made.node = node_of_head(job.kv_head, layer.n_kv_heads, facts_.n_nodes);
  made.q = (job.is_capped ? call.capped.q : call.q) + first * layer.k_head_dim;
  made.o = (job.is_capped ? call.capped.o : facts_.on_device ? call.host_o : call.o) + first * layer.v_head_dim;
  made.lse = (job.is_capped ? call.capped.lse : facts_.on_device ? call.host_lse : call.lse) + first;
  made.runs = runs_.data() + job.first_run;
  made.n_runs = static_cast<int32_t>(job.n_runs);
  made.n_keys = job.n_keys;
  made.runs_are_keys = job.n_runs > 0 && std::cmp_equal(job.n_keys, job.n_runs);
  if (job.n_queries > 1) made.visibility = &job.visibility;
  return made;
}

bool NamedJobs::next(const Cache& cache) {
  own_views_.clear();
  for (const SequenceCall& call : calls_) own_views_.push_back(cache.view(*call.sequence));
  return next(own_views_);
}

bool NamedJobs::next(std::span<const StoreView> views) {
  views_ = views;
  batch_.clear();
  int64_t n_runs = 0;
  while (call_ < calls_.size() && std::ssize(batch_) < kMostJobs) {
    const SequenceCall& call = calls_[call_];
    if (!has_jobs(call)) {
      ++call_;
      continue;
    }
    const int64_t n_queries = std::min(names_of(call).query_block, call.q_len - query_);
    const int64_t most = most_runs(call_, query_, kv_head_), n_jobs = has_capped_job(call, query_, n_queries) ? 2 : 1;
    if (!batch_.empty() && n_runs + n_jobs * most > kMostRuns) break;
    for (int64_t i = 0; i < n_jobs; ++i, n_runs += most)
      batch_.push_back({call_, query_, n_queries, kv_head_, static_cast<size_t>(n_runs), 0, i > 0});
    if (++kv_head_ < facts_.layer->n_kv_heads) continue;
    kv_head_ = 0;
    query_ += n_queries;
    if (query_ < call.q_len) continue;
    query_ = 0;
    ++call_;
  }
  if (batch_.empty()) return false;
  if (std::ssize(runs_) < n_runs) runs_.resize(static_cast<size_t>(n_runs));
  jobs_.resize(batch_.size());
  const Backend& cpu = *facts_.cpu;
  // Jobs are neighbours in memory (false sharing), so each worker counts in a copy.
  const auto fill_one = [](void* all, int64_t idx, int32_t) {
    auto* const jobs = static_cast<NamedJobs*>(all);
    Job filled = jobs->batch_[static_cast<size_t>(idx)];
    jobs->fill(&filled);
    Job& job = jobs->batch_[static_cast<size_t>(idx)] = filled;
    jobs->jobs_[static_cast<size_t>(idx)] = jobs->attend_job(job);
  };
  cpu.table->run(cpu.self, std::ssize(batch_), fill_one, this);
  for (const Job& job : batch_) {
    n_outside_ += job.n_keys - (facts_.on_device ? 0 : job.n_resident);
    n_resident_ += job.n_resident;
  }
  return true;
}

Status NamedJobs::attend(const Watch* watch) {
  const Backend& cpu = *facts_.cpu;
  const auto n = static_cast<int32_t>(jobs_.size());
  const bool is_whole = n_done_ == 0 && call_ == calls_.size();
  n_done_ += n;
  if (watch == nullptr) return cpu.table->attend(cpu.self, jobs_.data(), n);
  if (is_whole) return cpu.table->attend_watched(cpu.self, jobs_.data(), n, *watch);
  Watch of_batch = *watch;  // progress over the whole call is reported below
  of_batch.progress = nullptr;
  TANDEM_TRY(cpu.table->attend_watched(cpu.self, jobs_.data(), n, of_batch));
  const int32_t answer = watch->progress == nullptr ? 0 : watch->progress(n_done_, n_jobs(), watch->user);
  if (answer == 0) return {};
  return fail(TANDEM_ERROR_CANCELLED, "progress", "progress returned %d: the call was stopped", answer);
}

}  // namespace tandem
