// SPDX-License-Identifier: MIT
#include "lib/call/host_part.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>

#include "lib/base/set_if_other.h"
#include "lib/machine/placement.h"
#include "lib/store/cache.h"

namespace tandem {
namespace {

// A single query sees every key that was chosen for it, so it needs no mask.
bool is_host_masked(const Layer& layer, const SequenceCall& call) {
  return call.q_len > 1 && (layer.sliding_window > 0 || call.host_end > call.first_query);
}

// Adds the runs of the tokens that a KV head has selected. The view reaches to the end of these tokens.
struct SelectedRuns {
  const StoreView stored;
  const Layer& layer;
  int32_t layer_idx, kv_head;

  void add(const SelectedTokens& selected, std::vector<KvRun>* runs) const {
    const bool by_position = layer.rope != nullptr && !stored.positions.empty();
    if (!selected.copies.empty() && !by_position)
      add_copied(selected, runs);
    else
      add_stored(selected.tokens, by_position, runs);
  }
  void add_copied(const SelectedTokens& selected, std::vector<KvRun>* runs) const {
    const PlaneBytes bytes = plane_bytes(layer);
    const int64_t n_tokens = std::ssize(selected.tokens);
    for (const CopiedRows& block : selected.copies) {
      if (block.first >= n_tokens) break;
      KvRun run;
      point_run(block.row(bytes, block.first), layer, &run);
      run.n_tokens = std::min(block.n_rows, n_tokens - block.first);
      run.token_idx = -1;
      run.positions = selected.tokens.data() + block.first;
      runs->push_back(run);
    }
  }
  void add_stored(std::span<const int32_t> tokens, bool by_position, std::vector<KvRun>* runs) const {
    const int32_t* const token_idx = tokens.data();
    const int64_t n_tokens = std::ssize(tokens);
    for (int64_t i = 0; i < n_tokens;) {
      const int64_t token = token_idx[i], slot = token % stored.page_len;
      int64_t n = 1;
      while (i + n < n_tokens && token_idx[i + n] == token + n && slot + n < stored.page_len) ++n;
      KvRun run;
      point_run(stored.layers[layer_idx].rows(stored.run_at(token, token + 1), kv_head), layer, &run);
      run.n_tokens = n;
      run.token_idx = -1;
      run.first_position = token;
      if (by_position) run.positions = stored.positions.data() + token;
      runs->push_back(run);
      i += n;
    }
  }
};

}  // namespace

void HostPart::begin(const Facts& facts, const HostSlot& slot) {
  set_if_other(facts_, facts);
  set_if_other(slot_, slot);
  set_if_other(n_nodes_, n_nodes(facts.cache->engine().cpu()));
  calls_ = {};
  has_bases_ = false;
  rows_.clear();
  runs_.clear();
  jobs_.clear();
  first_runs_.clear();
  selected_jobs_.clear();
  merges_.clear();
  set_if_other(read_, {});
}

void HostPart::lay_out(std::span<SequenceCall> calls) {
  calls_ = calls;
  if (facts_.n_ahead > 0) return;
  if (facts_.keeps_maw) observed_.states.reserve(calls.size());
  const size_t n_heads = calls.size() * static_cast<size_t>(facts_.layer->n_kv_heads);
  jobs_.reserve(2 * n_heads);
  merges_.reserve(n_heads);
  states_.resize(4 * n_heads);
  if (is_on_device())
    for (SequenceCall& call : calls) point_to_slot(&call);
  views_.resize(calls.size());
  if (facts_.may_name) return;
  if (facts_.named != nullptr || facts_.selector_names) return begin_named();
  for (size_t i = 0; i < calls.size(); ++i) views_[i] = facts_.cache->view(*calls[i].sequence);
  lay_out_jobs();
}

void HostPart::lay_out_jobs() {
  for (const SequenceCall& call : calls_) {
    if (!is_on_device())
      lay_out_window(call);
    else if (call.has_cpu_part())
      lay_out_for_device(call);
  }
  finish_runs();
}

// Learned sinks are merged after all queries have been attended; for a call on a device, the device merges them.
void HostPart::begin_named() {
  const NamedJobs::Facts facts = {&facts_.cache->engine().cpu(),
                                  facts_.layer,
                                  facts_.heads_per_kv,
                                  facts_.layer_idx,
                                  facts_.n_ahead,
                                  facts_.named,
                                  facts_.sink_len,
                                  facts_.window_len,
                                  facts_.q_is_bf16,
                                  is_on_device(),
                                  facts_.is_speculative,
                                  n_nodes_};
  if (is_on_device()) return named_.begin_brought(facts, slot_, calls_);
  named_.begin(facts, calls_);
  for (const SequenceCall& call : calls_) {
    if (facts_.layer->sinks == nullptr && !call.capped.any) continue;
    for (int32_t h = 0; h < facts_.layer->n_kv_heads; ++h) add_merge(call, h);
  }
}

// Points to the rows of the ticket: queries that the slot brings and states that the device reads. The final lse take the
// place of the states' lse.
void HostPart::point_to_slot(SequenceCall* call) const {
  const auto floats = [&](int64_t at, int64_t n) {
    return reinterpret_cast<float*>(slot_.data + at) + call->first_row * facts_.layer->n_q_heads * n;
  };
  call->q = floats(slot_.exchange.q_at, facts_.layer->k_head_dim);
  call->host_o = floats(slot_.exchange.o_at, facts_.layer->v_head_dim);
  call->lse = call->host_lse = floats(slot_.exchange.lse_at, 1);
}

// Makes the jobs of the window and of the host part, for a call whose tensors are in host memory.
void HostPart::lay_out_window(const SequenceCall& call) {
  const Layer& layer = *facts_.layer;
  tokens_.clear();
  host_tokens_.clear();
  find_streaming_tokens(call);
  find_tokens(call, {call.first_job_key, call.length}, &tokens_);
  if (call.has_host) find_tokens(call, {call.host_begin, call.host_end}, &host_tokens_);
  const int64_t n_logits = layer.group_size * call.q_len * (call.length - call.resident_begin);
  for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
    AttendJob& window = add_job(call, h, call.o, call.lse);
    if (call.q_len > 1 || call.visibility.tree_words > 0)
      window.visibility = streams(h) ? &call.streaming_heads.visibility : &call.visibility;
    if (call.logits != nullptr) window.logits = call.logits + h * n_logits;
    add_runs(call, streams(h) ? streaming_tokens_ : tokens_, h);
    if (call.has_host) {
      AttendJob& host = add_job(call, h, call.host_o, call.host_lse);
      if (is_host_masked(layer, call)) host.visibility = &call.visibility;
      add_runs(call, host_tokens_, h);
      if (call.selected) selected_jobs_.push_back({jobs_.size() - 1, call_idx_of(call), h});
    }
    if (call.has_host || layer.sinks != nullptr) add_merge(call, h);
  }
}

// Makes the jobs of the keys that the window of a call on device tensors does not have.
void HostPart::lay_out_for_device(const SequenceCall& call) {
  tokens_.clear();
  host_tokens_.clear();
  find_streaming_tokens(call);
  find_tokens(call, {call.cpu_begin, call.host_end}, &host_tokens_);
  if (call.selected) find_tokens(call, {call.first_foreign(), call.resident_begin}, &tokens_);
  if (facts_.is_speculative) find_tokens(call, {call.first_query, call.length}, &tokens_);
  const auto find_narrow = [&](const DecodeKeys& head) {
    const SinksAndRange keys = keys_of_query(head, call.first_query);
    narrow_tokens_.clear();
    find_tokens(call, {call.cpu_begin, std::min(keys.sink_end(), call.host_end)}, &narrow_tokens_);
    find_tokens(call, {std::max(keys.begin, call.cpu_begin), call.host_end}, &narrow_tokens_);
  };
  for (int32_t h = 0; h < facts_.layer->n_kv_heads; ++h) {
    AttendJob& job = add_job(call, h, call.host_o, call.host_lse);
    if (streams(h) && call.q_len > 1 && call.streaming_heads.keys.sink_end > call.first_query)
      job.visibility = &call.streaming_heads.visibility;
    if (!streams(h) && (facts_.is_speculative || is_host_masked(*facts_.layer, call))) job.visibility = &call.visibility;
    const bool is_narrow = facts_.decode_keys != nullptr && !(*facts_.decode_keys)[static_cast<size_t>(h)].are_all;
    if (is_narrow) find_narrow((*facts_.decode_keys)[static_cast<size_t>(h)]);
    add_runs(call, is_narrow ? narrow_tokens_ : streams(h) ? streaming_tokens_ : host_tokens_, h);
    add_runs(call, tokens_, h);
    if (call.selected) selected_jobs_.push_back({jobs_.size() - 1, call_idx_of(call), h});
  }
}

// Adds a job. Its runs are those that are added before the next job.
AttendJob& HostPart::add_job(const SequenceCall& call, int32_t kv_head, float* o, float* lse) {
  const Layer& layer = *facts_.layer;
  const int64_t n_rows = call.q_len * layer.group_size;
  AttendJob job;
  job.layer = &layer;
  job.n_rows = static_cast<int32_t>(n_rows);
  job.q_is_bf16 = facts_.q_is_bf16 && layer.rope == nullptr && layer.k_rotation == TANDEM_ROTATION_NONE;
  job.node = node_of_head(kv_head, layer.n_kv_heads, n_nodes_);
  job.q = call.q + kv_head * n_rows * layer.k_head_dim;
  job.o = o + kv_head * n_rows * layer.v_head_dim;
  job.lse = lse + kv_head * n_rows;
  first_runs_.push_back(runs_.size());
  return jobs_.emplace_back(job);
}

void HostPart::find_tokens(const SequenceCall& call, TokenRange tokens, std::vector<TokenRun>* found) const {
  for (int64_t t = tokens.begin; t < tokens.end; t += found->back().n)
    found->push_back(first_tokens(call, views_[call_idx_of(call)], *facts_.layer, {t, tokens.end}));
}

// Finds the tokens of streaming heads: for a host call all that they see, for a device call those outside the window.
void HostPart::find_streaming_tokens(const SequenceCall& call) {
  streaming_tokens_.clear();
  if (facts_.heads == nullptr) return;
  const SinksAndNewest& keys = call.streaming_heads.keys;
  find_tokens(call, {0, keys.sink_end}, &streaming_tokens_);
  if (!is_on_device()) find_tokens(call, {keys.newest_begin, call.length}, &streaming_tokens_);
}

void HostPart::add_runs(const SequenceCall& call, const std::vector<TokenRun>& found, int32_t kv_head) {
  for (const TokenRun& at : found)
    runs_.push_back(run_of(call, views_[call_idx_of(call)], *facts_.layer, facts_.layer_idx, at, kv_head));
}

// Adds the merge for one KV head. It merges the states in call.o with those in host_o, or with those of the capped keys if
// there are any. A call with neither has one state.
void HostPart::add_merge(const SequenceCall& call, int32_t kv_head) {
  const Layer& layer = *facts_.layer;
  const int64_t n_rows = call.q_len * layer.group_size, first = kv_head * n_rows;
  const float** states = states_.data() + 4 * merges_.size();
  states[0] = call.o + first * layer.v_head_dim;
  states[2] = call.lse + first;
  const bool has_two = call.has_host || call.capped.any;
  if (has_two) {
    states[1] = (call.capped.any ? call.capped.o : call.host_o) + first * layer.v_head_dim;
    states[3] = (call.capped.any ? call.capped.lse : call.host_lse) + first;
  }
  MergeJob merge;
  merge.n_states = has_two ? 2 : 1;
  merge.n_rows = n_rows;
  merge.head_dim = layer.v_head_dim;
  merge.o = states;
  merge.lse = states + 2;
  if (layer.sinks != nullptr) merge.sinks = layer.sinks + int64_t{kv_head} * layer.group_size;
  merge.sink_period = layer.group_size;
  merge.o_out = call.o + first * layer.v_head_dim;
  merge.lse_out = call.lse + first;
  merges_.push_back(merge);
}

// Points the jobs to their runs. No run may be added afterwards, as runs_ could move.
void HostPart::finish_runs() {
  for (size_t j = 0; j < jobs_.size(); ++j) {
    AttendJob& job = jobs_[j];
    const size_t end = j + 1 < jobs_.size() ? first_runs_[j + 1] : runs_.size();
    job.runs = runs_.data() + first_runs_[j];
    job.n_runs = static_cast<int32_t>(end - first_runs_[j]);
    job.n_keys = 0;
    job.runs_are_keys = job.n_runs > 0;
    for (int32_t r = 0; r < job.n_runs; ++r) {
      job.n_keys += job.runs[r].n_tokens;
      job.runs_are_keys = job.runs_are_keys && job.runs[r].n_tokens == 1;
    }
  }
}

TicketCopy& HostPart::keep_copy(size_t call, bool keeps_pages) {
  if (late_.size() < calls_.size()) late_.resize(calls_.size());
  TicketCopy& late = late_[call];
  late.keys.length = 0;
  if (!keeps_pages) return late;
  if (!std::exchange(has_bases_, true)) bases_ = facts_.cache->store().bases();
  late.pages = calls_[call].sequence->pages;
  if (facts_.layer->rope != nullptr) late.positions = calls_[call].sequence->positions;
  return late;
}

// Updates the selections. Then the jobs get their runs again, with those of the selected keys.
void HostPart::choose() {
  for (size_t i = 0; i < calls_.size(); ++i)
    calls_[i].state->selection->select(calls_[i], is_on_device() ? &late_[i] : nullptr);
  if (selected_jobs_.empty()) return;
  const PageStore& store = facts_.cache->store();
  late_runs_.clear();
  auto late = selected_jobs_.begin();
  for (size_t j = 0; j < jobs_.size(); ++j) {
    first_runs_[j] = late_runs_.size();
    late_runs_.insert(late_runs_.end(), jobs_[j].runs, jobs_[j].runs + jobs_[j].n_runs);
    if (late == selected_jobs_.end() || late->job != j) continue;
    const SequenceCall& call = calls_[late->call];
    const StoreView stored = is_on_device() ? store.view(late_[late->call].pages, late_[late->call].positions, bases_)
                                            : facts_.cache->view(*call.sequence);
    const SelectedTokens selected = call.state->selection->selected(late->kv_head);
    SelectedRuns{stored, *facts_.layer, facts_.layer_idx, late->kv_head}.add(selected, &late_runs_);
    read_.host += std::ssize(selected.tokens) * plane_bytes(*facts_.layer).total();
    ++late;
  }
  runs_.swap(late_runs_);
  finish_runs();
}

void HostPart::observe() {
  const std::span<TicketCopy> late = is_on_device() ? std::span(late_).first(calls_.size()) : std::span<TicketCopy>();
  facts_.selector->observe({calls_, late, is_on_device() ? &slot_ : nullptr, facts_.is_speculative, &observed_});
}

bool HostPart::brings_named() const { return is_on_device() && NamedJobs::are_brought(slot_); }

// A planned step has already counted the keys that its calls would attend without named keys.
void HostPart::note_named() {
  if (!brings_named()) {
    for (const SequenceCall& call : calls_) call.state[facts_.n_ahead].named.clear();
    return;
  }
  if (!has_cpu_part(calls_)) begin_named();
  named_.note();
  const int64_t key_bytes = plane_bytes(*facts_.layer).total();
  read_ = {named_.n_outside() * key_bytes, named_.n_resident() * key_bytes};
  if (facts_.named != nullptr) return;
  for (const SequenceCall& call : calls_) {
    const int64_t of_token = key_bytes * facts_.layer->n_kv_heads;
    read_.host -= (call.host_end - call.host_begin) * of_token;
    read_.resident -= (call.length - call.resident_begin) * of_token;
  }
}

Status HostPart::attend(const Watch* watch) {
  if (facts_.may_name) {
    const PageStore& store = facts_.cache->store();
    for (size_t i = 0; i < calls_.size(); ++i) views_[i] = store.view(late_[i].pages, late_[i].positions, bases_);
    if (!brings_named()) {
      lay_out_jobs();
    } else {
      begin_named();
      while (named_.next(views_)) TANDEM_TRY(named_.attend(watch));
      return {};
    }
  }
  const Backend& cpu = facts_.cache->engine().cpu();
  const auto n_jobs = static_cast<int32_t>(jobs_.size());
  if (n_jobs > 0)
    TANDEM_TRY(watch != nullptr ? cpu.table->attend_watched(cpu.self, jobs_.data(), n_jobs, *watch)
                                : cpu.table->attend(cpu.self, jobs_.data(), n_jobs));
  if (merges_.empty()) return {};
  return cpu.table->merge_watched(cpu.self, merges_.data(), static_cast<int32_t>(merges_.size()),
                                  watch != nullptr ? *watch : Watch{});
}

// For a ticket only.
void HostPart::lose() {
  for (const SequenceCall& call : calls_) {
    if (!call.has_cpu_part()) continue;
    const int64_t n_rows = call.q_len * facts_.layer->n_q_heads;
    std::fill_n(call.host_o, n_rows * facts_.layer->v_head_dim, NAN);
    std::fill_n(call.host_lse, n_rows, NAN);
  }
}

}  // namespace tandem
