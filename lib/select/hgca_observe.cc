// SPDX-License-Identifier: MIT
// What "hgca" learns from a call. Weights of the call's queries go into the moving averages (MAW). The last queries of an
// append are held until all keys are judged.
//
// On host tensors the attend jobs have left the weights as logits, and keys are judged after the call. On a device the host
// counts weights of keys outside the window, and the device hands over the MAW of keys that leave the window. After a single
// query the host judges these keys at once. The pool's workers are awake then and idle until the next call's part. A
// background thread would first have to get a CPU, and the next call would have to wait for it. After an append, the next
// query that is not of an append judges all keys (HgcaState::select).
#include <algorithm>

#include "lib/select/hgca.h"

namespace tandem {
namespace {

HgcaState& state_of(const SequenceCall& call) { return static_cast<HgcaState&>(*call.state->selection); }

// Counts the weights of a call's single queries on host tensors. A task is one head's weights over the resident keys.
class HostWeights {
 public:
  HostWeights(const Hgca& hgca, std::span<SequenceCall> calls) : hgca_(hgca), calls_(calls) {}

  void count() {
    constexpr int64_t kWorthSpreading = 16384;  // weights
    int64_t n_weights = 0;
    for (const SequenceCall& call : calls_)
      if (call.observes) n_weights += hgca_.layer().n_q_heads * (call.length - call.resident_begin);
    if (n_weights == 0) return;
    const int64_t n_tasks = std::ssize(calls_) * hgca_.layer().n_q_heads;
    if (n_weights >= kWorthSpreading) return hgca_.cpu().table->run(hgca_.cpu().self, n_tasks, count_head, this);
    for (int64_t i = 0; i < n_tasks; ++i) count_head(this, i, 0);
  }

 private:
  static void count_head(void* weights, int64_t task_idx, int32_t) {
    const auto& self = *static_cast<const HostWeights*>(weights);
    const Backend& cpu = self.hgca_.cpu();
    const int32_t n_q_heads = self.hgca_.layer().n_q_heads;
    const SequenceCall& call = self.calls_[static_cast<size_t>(task_idx / n_q_heads)];
    if (!call.observes) return;
    const auto head = static_cast<int32_t>(task_idx % n_q_heads);
    const int64_t n_keys = call.length - call.resident_begin;
    for (int64_t j = 0; j < n_keys;) {
      const int64_t token = call.resident_begin + j;
      const int64_t n = std::min(Maw::kBlock - token % Maw::kBlock, n_keys - j);
      cpu.table->observe(cpu.self, state_of(call).maw.at(head, token), call.logits + head * n_keys + j, n, call.lse[head],
                         self.hgca_.options().alpha);
      j += n;
    }
  }

  const Hgca& hgca_;
  std::span<SequenceCall> calls_;
};

void observe_on_host(const Hgca& hgca, const Observation& seen) {
  for (const SequenceCall& call : seen.calls) {
    HgcaState& state = state_of(call);
    if (seen.is_speculative) std::copy_n(call.lse, state.guess.lse.size(), state.guess.lse.data());
    if (!call.is_append) continue;
    state.held.add(hgca.layer(), call);
    state.due = true;
  }
  HostWeights(hgca, seen.calls).count();
}

// Keeps queries and lse of speculative tokens. Their weights are counted if the tokens are kept.
void take_guess(std::span<SequenceCall> calls) {
  for (const SequenceCall& call : calls) {
    HeldGuess& guess = state_of(call).guess;
    std::copy_n(call.q, guess.q.size(), guess.q.data());
    std::copy_n(call.lse, guess.lse.size(), guess.lse.data());
  }
}

// Reorders from [q_len][n_q_heads], the device's order, to [n_kv_heads][q_len][group_size].
void sort_lse(const Layer& layer, SequenceCall* call, std::vector<float>* sorted) {
  const int64_t group = layer.group_size, n_q_heads = layer.n_q_heads;
  sorted->resize(static_cast<size_t>(call->q_len * n_q_heads));
  float* to = sorted->data();
  for (int64_t h = 0; h < layer.n_kv_heads; ++h)
    for (int64_t t = 0; t < call->q_len; ++t, to += group) std::copy_n(call->lse + t * n_q_heads + h * group, group, to);
  call->lse = sorted->data();
}

// Counts weights over all keys outside the window for an append. For a single query counts only over keys that were appended
// without this session and were never in its window.
void count_host_weights(const Hgca& hgca, const SequenceCall& call) {
  const Layer& layer = hgca.layer();
  const int64_t n = std::min(call.q_len, hgca.n_counted()), skipped = call.q_len - n;
  CountedQueries queries;
  queries.q = call.q + skipped * layer.group_size * layer.k_head_dim;
  queries.lse = call.lse + skipped * layer.group_size;
  queries.head_stride = call.q_len * layer.group_size;
  queries.n = n;
  queries.n_skipped = skipped;
  queries.begin = call.visibility.begin + skipped;
  queries.end = call.visibility.end + skipped;
  queries.first_token = call.is_append ? 0 : call.foreign_begin;
  queries.end_token = call.resident_begin;
  state_of(call).count_weights(queries);
}

// After an append, the next query that is not of an append judges all keys, so a prompt in chunks has them judged once. If
// the append has as many queries as count, these are held until then and replace the queries of earlier appends.
void keep_append(const Hgca& hgca, const SequenceCall& call) {
  HgcaState& state = state_of(call);
  state.due = true;
  if (call.q_len >= hgca.n_counted()) {
    state.held.clear();
    if (!call.counts_on_host()) return;
    state.held.add(hgca.layer(), call);
    state.held.end_token = call.resident_begin;
    return;
  }
  state.count_held();
  if (call.counts_on_host()) count_host_weights(hgca, call);
}

// Takes the MAW of keys that leave the window. The device has left them in the slot: [n_q_heads][n_evicted] of all
// sequences.
void take_evicted(const Hgca& hgca, const SequenceCall& call, const HostSlot& slot) {
  const auto* maw = reinterpret_cast<const float*>(slot.data + slot.exchange.maw_at);
  for (int64_t t = call.resident_begin; t < call.evict_end;) {
    const int64_t n = std::min(Maw::kBlock - t % Maw::kBlock, call.evict_end - t);
    for (int32_t h = 0; h < hgca.layer().n_q_heads; ++h)
      std::copy_n(maw + h * int64_t{slot.exchange.n_evicted} + call.first_evicted + t - call.resident_begin, n,
                  state_of(call).maw.at(h, t));
    t += n;
  }
}

}  // namespace

void Hgca::observe(const Observation& seen) {
  if (seen.slot == nullptr) return observe_on_host(*this, seen);
  if (seen.is_speculative) return take_guess(seen.calls);
  std::vector<SelectState*>& judged = seen.scratch->states;
  judged.clear();
  for (size_t i = 0; i < seen.calls.size(); ++i) {
    SequenceCall& call = seen.calls[i];
    HgcaState& state = state_of(call);
    state.join();
    if (call.only_counts) sort_lse(layer_, &call, &seen.scratch->lse);
    state.take_keys(&seen.late[i].keys);
    if (call.is_append)
      keep_append(*this, call);
    else if (call.counts_on_host())
      count_host_weights(*this, call);
    take_evicted(*this, call, *seen.slot);
    state.host_end = call.evict_end;
    if (call.is_append || call.evict_end <= call.foreign_begin) continue;
    state.evict_begin = call.foreign_begin;
    state.evict_end = call.evict_end;
    judged.push_back(&state);
  }
  judge_evicted_by_all(judged);
}

}  // namespace tandem
