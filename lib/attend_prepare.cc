// SPDX-License-Identifier: MIT
// What an attend call does before the first key is read: sequences, memory, which keys, where they are.
#include <algorithm>

#include "lib/attend_call.h"
#include "lib/placement.h"

namespace tandem {

Status AttendCall::enter() {
  scratch_.calls.clear();
  scratch_.calls.reserve(static_cast<size_t>(args_.n_sequences));
  int64_t first_row = 0;
  for (int32_t i = 0; i < args_.n_sequences; ++i) {
    SequenceCall call;
    const int64_t id = args_.sequences[i];
    call.sequence = cache_.find(id);
    if (call.sequence == nullptr)
      return fail(TANDEM_ERROR_NOT_FOUND, "sequences", "sequences[%d] = %lld is not in this cache", i,
                  static_cast<long long>(id));
    const Sequence& sequence = *call.sequence;
    const bool foreign = sequence.writer != nullptr && sequence.writer != &session_;
    if (foreign || (args_.k != nullptr && sequence.n_readers > 0))
      return fail(TANDEM_ERROR_BUSY, "sequences", "sequences[%d] = %lld is in flight in another session", i,
                  static_cast<long long>(id));
    call.q_len = args_.q_lens[i];
    call.first_row = first_row;
    first_row += call.q_len;
    if (call.q_len == 0) continue;
    call.length = sequence.lengths[layer_idx_] + (args_.k != nullptr ? call.q_len : 0);
    call.first_query = call.length - call.q_len;
    call.is_append = !args_.speculative && (call.q_len > 1 || args_.partial);
    if (args_.speculative && heads_ != nullptr)
      return fail(TANDEM_ERROR_UNSUPPORTED, "flags", "flags = TANDEM_ATTEND_SPECULATIVE: layer %d has streaming heads",
                  args_.layer_idx);
    TANDEM_TRY(check_state(call));
    scratch_.calls.push_back(call);
  }
  for (SequenceCall& call : scratch_.calls) {
    call.writer_before = call.sequence->writer;
    if (args_.k != nullptr)
      call.sequence->writer = &session_;
    else
      ++call.sequence->n_readers;
  }
  return {};
}

Status AttendCall::check_state(const SequenceCall& call) const {
  const Sequence& sequence = *call.sequence;
  const auto id = static_cast<long long>(sequence.id);
  if (sequence.speculative[layer_idx_] != 0)
    return fail(TANDEM_ERROR_INVALID_STATE, "sequences",
                "sequence %lld has %lld speculative tokens in layer %d: commit them first", id,
                static_cast<long long>(sequence.speculative[layer_idx_]), args_.layer_idx);
  if (args_.speculative && sequence.speculator != nullptr && sequence.speculator != &session_)
    return fail(TANDEM_ERROR_BUSY, "sequences", "sequence %lld has speculative tokens of another session", id);
  if (call.first_query < 0)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "q_lens",
                "q_lens = %lld queries are more than the %lld tokens of sequence %lld", static_cast<long long>(call.q_len),
                static_cast<long long>(call.length), id);
  if (args_.k == nullptr || !session_.in_step_) return {};
  for (const Session::StepSequence& step : session_.step_) {
    if (step.id != sequence.id) continue;
    const int64_t left = step.lengths[layer_idx_] + step.q_len - sequence.lengths[layer_idx_];
    if (call.q_len <= left) return {};
    return fail(TANDEM_ERROR_INVALID_STATE, "q_lens", "q_lens = %lld for sequence %lld: the step has %lld left in layer %d",
                static_cast<long long>(call.q_len), id, static_cast<long long>(left), args_.layer_idx);
  }
  return fail(TANDEM_ERROR_INVALID_STATE, "sequences", "sequence %lld is not part of the open step", id);
}

Status AttendCall::wait_for_refreshes() {
  for (SequenceCall& call : scratch_.calls) {
    SequenceState* state = nullptr;
    {
      std::shared_lock lock(cache_.mutex());
      state = session_.state(call.sequence->id);
    }
    if (state != nullptr) session_.sums_.refresh_wait_ns += session_.join(*state->layers[layer_idx_], args_.watch);
    TANDEM_TRY(args_.watch.check());
  }
  return {};
}

void AttendCall::clear_scratch() {
  scratch_.n_floats = 0;
  scratch_.begin.clear();
  scratch_.end.clear();
  scratch_.tree_bits.clear();
  scratch_.tree_positions.clear();
  scratch_.runs.clear();
  scratch_.jobs.clear();
  scratch_.job_runs.clear();
}

Status AttendCall::prepare() {
  clear_scratch();
  for (SequenceCall& call : scratch_.calls) {
    Sequence& sequence = *call.sequence;
    // Only what is going to be written needs pages of its own.
    if (args_.k != nullptr)
      TANDEM_TRY(cache_.ensure(sequence, std::max(sequence.longest(), call.length), "q_lens", args_.watch));
    else
      TANDEM_TRY(session_.reserve_state(sequence, sequence.longest(), args_.watch));
    if (args_.parent_idx == nullptr)
      cache_.extend_positions(sequence, call.length);
    else
      sequence.parents.reserve(static_cast<size_t>(call.q_len));
    call.state = session_.state(sequence.id)->layers[layer_idx_].get();
    session_.fetch_maw(sequence);
    if (!call.is_append) TANDEM_TRY(session_.flush_layer(sequence, args_.layer_idx, *call.state));
    call.found_begin = call.window_begin = call.state->window_begin;
    TANDEM_TRY(set_visibility(call));
    choose_keys(call);
    choose_for_streaming_heads(call);
    if (policy_.keeps_maw) prepare_refresh(call);
    lay_out(call);
  }
  for (const SequenceCall& call : scratch_.calls) add_jobs(call);
  scratch_.floats.reserve(scratch_.n_floats);
  finish_jobs();
  return {};
}

// Causal: query t sees tokens up to its own, at most a sliding window back.
Status AttendCall::set_visibility(SequenceCall& call) {
  call.visibility_at = scratch_.begin.size();
  const size_t n = call.visibility_at + static_cast<size_t>(call.q_len);
  for (std::vector<int64_t>* list : {&scratch_.begin, &scratch_.end})
    if (list->capacity() < n) list->reserve(std::max(n, 2 * list->capacity()));
  if (args_.speculative && args_.parent_idx != nullptr) set_tree(call);
  for (int64_t t = 0; t < call.q_len; ++t) {
    if (t % kManyTokens == 0) TANDEM_TRY(args_.watch.check());
    const int64_t token = call.first_query + t;
    const bool tree = call.visibility.tree_words > 0;
    const int64_t position =
        tree ? scratch_.tree_positions[call.positions_at + static_cast<size_t>(t)] : call.sequence->position(token);
    const int64_t begin =
        layer_.sliding_window > 0 ? cache_.first_within(*call.sequence, position, layer_.sliding_window) : 0;
    scratch_.begin.push_back(std::min(begin, tree ? call.first_query : token));
    scratch_.end.push_back(token + 1);
  }
  return {};
}

// A query of the tree sees its ancestors and itself among the new tokens, and sits as deep as its chain is long.
void AttendCall::set_tree(SequenceCall& call) {
  const int32_t* parents = args_.parent_idx + call.first_row;
  const int32_t n_words = static_cast<int32_t>((call.q_len + 63) / 64);
  call.visibility.tree_begin = call.first_query;
  call.visibility.tree_words = n_words;
  call.tree_at = scratch_.tree_bits.size();
  call.positions_at = scratch_.tree_positions.size();
  scratch_.tree_bits.resize(call.tree_at + static_cast<size_t>(call.q_len * n_words), 0);
  scratch_.depths.assign(static_cast<size_t>(call.q_len), 0);
  const int64_t root = call.sequence->position(call.first_query);
  // Within the tree, windows reach back along the chain.
  const bool streaming = policy_.host_keys(false) == HostKeys::kSinks;
  int64_t reach = layer_.sliding_window > 0 ? layer_.sliding_window : INT64_MAX;
  if (streaming) reach = std::min(reach, session_.options_.window_len);
  const int64_t sink_end = streaming && layer_.sliding_window == 0 ? session_.options_.sink_len : 0;
  for (int64_t t = 0; t < call.q_len; ++t) {
    const int32_t depth = parents[t] < 0 ? 0 : scratch_.depths[static_cast<size_t>(parents[t])] + 1;
    scratch_.depths[static_cast<size_t>(t)] = depth;
    scratch_.tree_positions.push_back(static_cast<int32_t>(root + depth));
    uint64_t* bits = scratch_.tree_bits.data() + call.tree_at + static_cast<size_t>(t * n_words);
    for (int64_t a = t; a >= 0; a = parents[a]) {
      const int64_t up = scratch_.depths[static_cast<size_t>(a)];
      if (depth - up < reach || call.first_query + up < sink_end) bits[a / 64] |= uint64_t{1} << (a % 64);
    }
  }
}

void AttendCall::choose_keys(SequenceCall& call) {
  const HostKeys host = policy_.host_keys(call.is_append);
  const int64_t least =
      *std::min_element(scratch_.begin.begin() + static_cast<std::ptrdiff_t>(call.visibility_at), scratch_.begin.end());
  call.dense_begin = least;
  if (host == HostKeys::kSinks) return choose_streaming(call);
  call.resident_begin = std::max(std::min(call.window_begin, call.length), least);
  call.host_begin = least;
  call.host_end = call.resident_begin;
  if (host == HostKeys::kSelected) {
    call.host_end = std::min(session_.options_.sink_len, call.resident_begin);
    call.selected = true;
    // On a device nobody knows yet what will have been selected when the call's turn comes.
    for (const HeadSelection& head : call.state->heads) call.n_selected += args_.on_device ? 0 : head.n_tokens;
  }
  call.has_host = call.host_end > call.host_begin || call.n_selected > 0 || (args_.on_device && call.resident_begin > least);
  call.first_job_key = call.resident_begin;
  // One processor has both parts, and they are one range: one job, and nothing to merge.
  if (host == HostKeys::kAll && !args_.on_device) {
    call.first_job_key = call.host_begin;
    call.has_host = false;
  }
  call.observes = policy_.keeps_maw && !call.is_append && !args_.speculative;
}

// Sinks and the newest window_len tokens of each query; inside a sliding-window layer there are no sinks to see.
void AttendCall::choose_streaming(SequenceCall& call) {
  call.visibility.sink_end = layer_.sliding_window > 0 ? 0 : session_.options_.sink_len;
  int64_t least = INT64_MAX;
  for (int64_t t = 0; t < call.q_len; ++t) {
    int64_t& begin = scratch_.begin[call.visibility_at + static_cast<size_t>(t)];
    // In a tree the window counts along the chain: siblings do not push each other out.
    const bool tree = call.visibility.tree_words > 0;
    const int64_t newest = call.first_query + (tree ? scratch_.depths[static_cast<size_t>(t)] : t);
    const int64_t reached = newest + 1 - session_.options_.window_len;
    begin = std::max(begin, tree ? std::min(reached, call.first_query) : reached);
    least = std::min(least, begin);
  }
  const SinksAndNewest keys =
      sinks_and_newest(session_.options_, call.visibility.sink_end, least, call.length, args_.on_device);
  call.host_begin = 0;
  call.host_end = keys.sink_end;
  call.resident_begin = keys.newest_begin;
  call.has_host = call.host_end > 0;
  call.first_job_key = call.resident_begin;
}

// Room for what the refresh after this call will need.
void AttendCall::prepare_refresh(SequenceCall& call) {
  Refresh& refresh = call.state->refresh;
  bind_refresh(session_, *call.state, layer_);
  const auto heads = static_cast<size_t>(layer_.n_q_heads);
  if (args_.speculative) {
    Speculation& speculation = call.state->speculation;
    speculation.q.clear();
    speculation.first_key = call.resident_begin;
    speculation.n_keys = call.length - call.resident_begin;
    speculation.logits.resize(heads * static_cast<size_t>(call.q_len * speculation.n_keys));
    speculation.lse.resize(heads * static_cast<size_t>(call.q_len));
    return;
  }
  if (call.is_append) {
    const auto capacity = static_cast<size_t>(refresh_queries(session_.options_.alpha));
    refresh.q.resize(capacity * heads * static_cast<size_t>(layer_.k_head_dim));
    refresh.lse.resize(capacity * heads);
    refresh.begin.resize(capacity);
    refresh.end.resize(capacity);
  }
  const bool evicts = call.length - call.state->window_begin >=
                      session_.options_.window_len + evict_len(session_.options_.window_len, cache_.page_len());
  if (!call.is_append && !evicts) return;
  const int64_t first = call.is_append || refresh.wants_all ? 0 : call.state->window_begin;
  session_.fill_runs(*call.sequence, args_.layer_idx, first, call.length, &refresh.keys);
  reserve_refresh(refresh);
}

void AttendCall::lay_out(SequenceCall& call) {
  const int64_t n_rows = layer_.n_q_heads * call.q_len;
  call.q_at = scratch_.take(n_rows * layer_.k_head_dim);
  call.o_at = scratch_.take(n_rows * layer_.v_head_dim);
  call.lse_at = scratch_.take(n_rows);
  if (call.has_host) {
    call.host_o_at = scratch_.take(n_rows * layer_.v_head_dim);
    call.host_lse_at = scratch_.take(n_rows);
  }
  if (call.observes) call.logits_at = scratch_.take(n_rows * (call.length - call.resident_begin));
}

// Where the contiguous keys of a part are: the same for every KV head.
void AttendCall::find_spans(const SequenceCall& call, int64_t begin, int64_t end, std::vector<PageSpan>* spans) const {
  spans->clear();
  // The tokens of a tree have positions of their own: a run ends where they begin.
  const bool tree = call.visibility.tree_words > 0 && layer_.rope != nullptr;
  const int64_t split = tree ? std::clamp(call.first_query, begin, end) : end;
  cache_.spans(*call.sequence, begin, split, spans);
  if (split < end) cache_.spans(*call.sequence, split, end, spans);
  if (layer_.rope != nullptr) Cache::split_at_gaps(*call.sequence, spans);
}

void AttendCall::add_runs(const SequenceCall& call, const std::vector<PageSpan>& spans, int32_t kv_head) {
  const bool tree = call.visibility.tree_words > 0 && layer_.rope != nullptr;
  for (const PageSpan& span : spans) {
    KvRun run = cache_.run(*call.sequence, span, args_.layer_idx, kv_head);
    if (tree && span.token_idx >= call.first_query)
      run.positions = scratch_.tree_positions.data() + call.positions_at + (span.token_idx - call.first_query);
    scratch_.runs.push_back(run);
  }
}

void AttendCall::add_selected_runs(const SequenceCall& call, const StoredPages& stored, int32_t kv_head) {
  const HeadSelection& head = call.state->heads[static_cast<size_t>(kv_head)];
  if (head.n_tokens == 0) return;
  const auto* token_idx = head.token_idx.as<int32_t>();
  const bool by_position = layer_.rope != nullptr && !stored.positions.empty();
  if (head.n_copied == head.n_tokens && !by_position) {
    const PlaneBytes& bytes = cache_.store().row_bytes(args_.layer_idx);
    for (const SelectionChunk& chunk : head.chunks) {
      if (chunk.first >= head.n_tokens) break;
      KvRun run;
      point_run(chunk.row(bytes, chunk.first), layer_, &run);
      run.n_tokens = std::min(chunk.n_rows, head.n_tokens - chunk.first);
      run.token_idx = -1;
      run.positions = token_idx + chunk.first;
      scratch_.runs.push_back(run);
    }
    return;
  }
  for (int64_t i = 0; i < head.n_tokens;) {
    const int64_t token = token_idx[i], slot = token % cache_.page_len();
    int64_t n = 1;
    while (i + n < head.n_tokens && token_idx[i + n] == token + n && slot + n < cache_.page_len()) ++n;
    KvRun run;
    const int32_t page = stored.pages[static_cast<size_t>(token / cache_.page_len())];
    point_run(cache_.store().rows(stored.bases, page, slot, args_.layer_idx, kv_head), layer_, &run);
    run.n_tokens = n;
    run.token_idx = -1;
    run.first_position = token;
    if (by_position) run.positions = stored.positions.data() + token;
    scratch_.runs.push_back(run);
    i += n;
  }
}

AttendJob AttendCall::plain_job(const SequenceCall& call, int32_t kv_head) const {
  AttendJob job;
  job.layer = &layer_;
  job.n_rows = static_cast<int32_t>(call.q_len * layer_.group_size);
  job.q_is_bf16 = args_.q.dtype == TANDEM_BF16 && layer_.rope == nullptr && layer_.k_rotation == TANDEM_ROTATION_NONE;
  job.node = node_of_head(kv_head, layer_.n_kv_heads, n_nodes(cpu_));
  return job;
}

// Jobs point into vectors that still grow: indices now, pointers in finish_jobs().
void AttendCall::add_jobs(const SequenceCall& call) {
  find_spans(call, call.first_job_key, call.length, &scratch_.spans);
  find_spans(call, call.host_begin, call.host_end, &scratch_.host_spans);
  find_streaming_spans(call, &scratch_.streaming_spans);
  for (int32_t h = 0; h < layer_.n_kv_heads; ++h) {
    const AttendJob job = plain_job(call, h);
    scratch_.job_runs.push_back(scratch_.runs.size());
    add_runs(call, streams(h) ? scratch_.streaming_spans : scratch_.spans, h);
    scratch_.jobs.push_back(job);
    if (!call.has_host) continue;
    scratch_.job_runs.push_back(scratch_.runs.size());
    add_runs(call, scratch_.host_spans, h);
    if (call.selected) add_selected_runs(call, {call.sequence->pages, cache_.store().bases(), call.sequence->positions}, h);
    scratch_.jobs.push_back(job);
  }
}

// Job j, once all runs are known.
AttendJob& AttendCall::finish_runs(size_t j) {
  AttendJob& job = scratch_.jobs[j];
  job.runs = scratch_.runs.data() + scratch_.job_runs[j];
  job.n_runs = static_cast<int32_t>(scratch_.job_runs[j + 1] - scratch_.job_runs[j]);
  job.n_keys = 0;
  job.runs_are_keys = job.n_runs > 0;
  for (int32_t r = 0; r < job.n_runs; ++r) {
    job.n_keys += job.runs[r].n_tokens;
    job.runs_are_keys = job.runs_are_keys && job.runs[r].n_tokens == 1;
  }
  return job;
}

void AttendCall::point_visibility(SequenceCall* call) {
  call->visibility.begin = scratch_.begin.data() + call->visibility_at;
  call->visibility.end = scratch_.end.data() + call->visibility_at;
  if (call->visibility.tree_words > 0) call->visibility.tree_bits = scratch_.tree_bits.data() + call->tree_at;
  call->streaming_heads.visibility.begin = scratch_.begin.data() + call->streaming_heads.visibility_at;
  call->streaming_heads.visibility.end = scratch_.end.data() + call->streaming_heads.visibility_at;
}

// A single query sees every key that was chosen for it.
bool AttendCall::is_host_masked(const SequenceCall& call) const {
  return call.q_len > 1 && (layer_.sliding_window > 0 || call.host_end > call.first_query);
}

void AttendCall::finish_jobs() {
  scratch_.job_runs.push_back(scratch_.runs.size());
  scratch_.merges.clear();
  scratch_.merges.reserve(scratch_.calls.size() * static_cast<size_t>(layer_.n_kv_heads));
  scratch_.states.resize(4 * scratch_.calls.size() * static_cast<size_t>(layer_.n_kv_heads));
  size_t j = 0;
  for (SequenceCall& call : scratch_.calls) {
    point_visibility(&call);
    const int64_t rows = call.q_len * layer_.group_size, n_keys = call.length - call.resident_begin;
    for (int64_t h = 0; h < layer_.n_kv_heads; ++h) {
      AttendJob& resident = finish_runs(j++);
      resident.q = scratch_.at(call.q_at) + h * rows * layer_.k_head_dim;
      resident.visibility = visibility_of(call, static_cast<int32_t>(h), call.q_len > 1 || call.visibility.tree_words > 0);
      resident.o = scratch_.at(call.o_at) + h * rows * layer_.v_head_dim;
      resident.lse = scratch_.at(call.lse_at) + h * rows;
      if (call.observes) resident.logits = scratch_.at(call.logits_at) + h * rows * n_keys;
      if (args_.speculative && policy_.keeps_maw)
        resident.logits = call.state->speculation.logits.data() + h * rows * n_keys;
      if (!call.has_host && layer_.sinks == nullptr) continue;
      MergeJob merge;
      const float** states = scratch_.states.data() + 4 * scratch_.merges.size();
      states[0] = resident.o;
      states[2] = resident.lse;
      merge.n_states = 1;
      if (call.has_host) {
        AttendJob& host = finish_runs(j++);
        host.q = resident.q;
        host.visibility = is_host_masked(call) ? &call.visibility : nullptr;
        host.o = scratch_.at(call.host_o_at) + h * rows * layer_.v_head_dim;
        host.lse = scratch_.at(call.host_lse_at) + h * rows;
        states[1] = host.o;
        states[3] = host.lse;
        merge.n_states = 2;
      }
      merge.n_rows = rows;
      merge.head_dim = layer_.v_head_dim;
      merge.o = states;
      merge.lse = states + 2;
      if (layer_.sinks != nullptr) merge.sinks = layer_.sinks + h * layer_.group_size;
      merge.sink_period = layer_.group_size;
      merge.o_out = resident.o;
      merge.lse_out = resident.lse;
      scratch_.merges.push_back(merge);
    }
  }
}

}  // namespace tandem
