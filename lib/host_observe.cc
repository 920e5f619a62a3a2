// SPDX-License-Identifier: MIT
// What a host part leaves behind, where the policy keeps moving averages of attention weights (MAW): weights of the call's
// queries go into the MAW, and the last queries of an append to the refresh that judges all keys.
//
// On host tensors weights are those that the jobs have left as logits; keys are judged after the call. On a device the host
// counts weights of the keys that the window does not have, and the device hands over the MAW of the keys that leave the
// window. After a single query these keys are judged at once: the pool's workers are awake then and have nothing else to do
// until the next call's part, while a background thread would have to get a CPU first, and the next call to wait for it.
// After an append all keys are judged, by the next query that is not of an append (HostPart::choose).
#include <algorithm>
#include <cstring>

#include "lib/host_part.h"
#include "lib/session.h"

namespace tandem {

void HostPart::observe() {
  if (!is_on_device()) return observe_on_host();
  if (facts_.is_speculative) return take_guess();
  take_observation();
}

// One query head of one sequence: its only query's weights over the resident keys.
void HostPart::observe_head(void* part, int64_t task_idx, int32_t) {
  const auto& self = *static_cast<const HostPart*>(part);
  const Layer& layer = *self.facts_.layer;
  const Backend& cpu = self.facts_.cache->engine().cpu();
  const SequenceCall& call = self.calls_[static_cast<size_t>(task_idx / layer.n_q_heads)];
  if (!call.observes) return;
  const auto head = static_cast<int32_t>(task_idx % layer.n_q_heads);
  const int64_t n_keys = call.length - call.resident_begin;
  for (int64_t j = 0; j < n_keys;) {
    const int64_t token = call.resident_begin + j;
    const int64_t n = std::min(Maw::kBlock - token % Maw::kBlock, n_keys - j);
    cpu.table->observe(cpu.self, call.state->maw.at(head, token), call.logits + head * n_keys + j, n, call.lse[head],
                       self.facts_.options->alpha);
    j += n;
  }
}

void HostPart::observe_on_host() {
  if (!facts_.keeps_maw) return;
  const Backend& cpu = facts_.cache->engine().cpu();
  int64_t n_weights = 0;
  for (const SequenceCall& call : calls_) {
    if (call.observes) n_weights += facts_.layer->n_q_heads * (call.length - call.resident_begin);
    if (call.is_append) save_queries(call);
    if (facts_.is_speculative) std::copy_n(call.lse, call.state->speculation.lse.size(), call.state->speculation.lse.data());
  }
  if (n_weights == 0) return;
  constexpr int64_t kWorthSpreading = 16384;
  const int64_t n_tasks = static_cast<int64_t>(calls_.size()) * facts_.layer->n_q_heads;
  if (n_weights >= kWorthSpreading) return cpu.table->run(cpu.self, n_tasks, observe_head, this);
  for (int64_t i = 0; i < n_tasks; ++i) observe_head(this, i, 0);
}

// The last queries of an append go to the refresh; older ones it still holds (from earlier chunks) move up or fade.
void HostPart::save_queries(const SequenceCall& call) const {
  const Layer& layer = *facts_.layer;
  Refresh& refresh = call.state->refresh;
  const auto capacity = static_cast<int64_t>(refresh.begin.size());
  const int64_t n_new = std::min(call.q_len, capacity);
  const int64_t n_old = std::min(refresh.n_queries, capacity - n_new);
  const int64_t n_gone = refresh.n_queries - n_old;
  const int64_t row = int64_t{layer.group_size} * layer.k_head_dim, first = call.q_len - n_new;
  for (int64_t h = 0; h < layer.n_kv_heads; ++h) {
    float* q = refresh.q.data() + h * capacity * row;
    float* lse = refresh.lse.data() + h * capacity * layer.group_size;
    std::memmove(q, q + n_gone * row, static_cast<size_t>(n_old * row) * sizeof(float));
    std::memmove(lse, lse + n_gone * layer.group_size, static_cast<size_t>(n_old * layer.group_size) * sizeof(float));
    std::copy_n(call.q + (h * call.q_len + first) * row, n_new * row, q + n_old * row);
    std::copy_n(call.lse + (h * call.q_len + first) * layer.group_size, n_new * layer.group_size,
                lse + n_old * layer.group_size);
  }
  std::memmove(refresh.begin.data(), refresh.begin.data() + n_gone, static_cast<size_t>(n_old) * sizeof(int64_t));
  std::memmove(refresh.end.data(), refresh.end.data() + n_gone, static_cast<size_t>(n_old) * sizeof(int64_t));
  std::copy_n(call.visibility.begin + first, n_new, refresh.begin.data() + n_old);
  std::copy_n(call.visibility.end + first, n_new, refresh.end.data() + n_old);
  refresh.n_queries = n_old + n_new;
  refresh.n_skipped += n_gone + first;
  refresh.held_end = call.length;
  refresh.due = true;
}

// Queries and lse of speculative tokens, whose weights are counted if they stay.
void HostPart::take_guess() const {
  for (const SequenceCall& call : calls_) {
    Speculation& speculation = call.state->speculation;
    std::copy_n(call.q, speculation.q.size(), speculation.q.data());
    std::copy_n(call.lse, speculation.lse.size(), speculation.lse.data());
  }
}

void HostPart::take_observation() {
  judged_.clear();
  for (size_t i = 0; i < calls_.size(); ++i) {
    SequenceCall& call = calls_[i];
    Refresh& refresh = call.state->refresh;
    refresh.session->join(*call.state);
    if (call.only_counts) sort_lse(&call);
    refresh.take_keys(&late_[i].keys);
    if (call.is_append)
      keep_append(call);
    else if (call.counts_on_host())
      count_host_weights(call);
    take_evicted(call);
    refresh.host_end = call.evict_end;
    if (!call.is_append && call.evict_end > call.found_begin) {
      refresh.evict_begin = call.found_begin;
      refresh.evict_end = call.evict_end;
      judged_.push_back(&refresh);
    }
  }
  judge_evicted_by_all(judged_);
}

// From [q_len][n_q_heads], as the device has them, to [n_kv_heads][q_len][group_size].
void HostPart::sort_lse(SequenceCall* call) {
  const int64_t group = facts_.layer->group_size, n_q_heads = facts_.layer->n_q_heads;
  sorted_lse_.resize(static_cast<size_t>(call->q_len * n_q_heads));
  float* to = sorted_lse_.data();
  for (int64_t h = 0; h < facts_.layer->n_kv_heads; ++h)
    for (int64_t t = 0; t < call->q_len; ++t, to += group) std::copy_n(call->lse + t * n_q_heads + h * group, group, to);
  call->lse = sorted_lse_.data();
}

// All keys are judged after an append, at the next query that is not of an append: a prompt in chunks has them judged once.
// Where the append has as many queries as matter, these are held until then, and replace the queries of appends before it.
void HostPart::keep_append(const SequenceCall& call) const {
  Refresh& refresh = call.state->refresh;
  refresh.due = true;
  if (call.q_len >= refresh_queries(facts_.options->alpha)) {
    refresh.n_queries = refresh.n_skipped = 0;
    if (!call.counts_on_host()) return;
    save_queries(call);
    refresh.held_end = call.resident_begin;
    return;
  }
  count_held(refresh);
  if (call.counts_on_host()) count_host_weights(call);
}

// The MAW of the keys that leave the window, which the device has left in the slot: [n_q_heads][n_evicted] of all sequences.
void HostPart::take_evicted(const SequenceCall& call) const {
  const auto* maw = reinterpret_cast<const float*>(slot_.data + slot_.exchange.maw_at);
  for (int64_t t = call.resident_begin; t < call.evict_end;) {
    const int64_t n = std::min(Maw::kBlock - t % Maw::kBlock, call.evict_end - t);
    for (int32_t h = 0; h < facts_.layer->n_q_heads; ++h)
      std::copy_n(maw + h * int64_t{slot_.exchange.n_evicted} + call.first_evicted + t - call.resident_begin, n,
                  call.state->maw.at(h, t));
    t += n;
  }
}

// Of an append over all the host's keys; of a single query over those that the session has just found.
void HostPart::count_host_weights(const SequenceCall& call) const {
  const Layer& layer = *facts_.layer;
  const int64_t n = std::min(call.q_len, refresh_queries(facts_.options->alpha)), skipped = call.q_len - n;
  CountedQueries queries;
  queries.q = call.q + skipped * layer.group_size * layer.k_head_dim;
  queries.lse = call.lse + skipped * layer.group_size;
  queries.head_stride = call.q_len * layer.group_size;
  queries.n = n;
  queries.n_skipped = skipped;
  queries.begin = call.visibility.begin + skipped;
  queries.end = call.visibility.end + skipped;
  queries.first_token = call.is_append ? 0 : call.found_begin;
  queries.end_token = call.resident_begin;
  count_weights(call.state->refresh, queries);
}

}  // namespace tandem
