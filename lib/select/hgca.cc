// SPDX-License-Identifier: MIT
// HGCA (Deng et al., "HGCA: hybrid GPU-CPU attention for long context LLM inference", section 3.2).
//
// Each query head keeps a moving average of the attention weight (MAW) that every key in the window has received. A key that
// leaves the window takes its MAW along. It stays in the sparse set of its head if it was salient:
//
//   at eviction        maw > beta / window size
//   after an append    maw > beta / host size, for every key outside the window, so dropped keys may come back
//
// The threshold is a fraction of the weight that a uniform head would give each key. So a peaked head keeps few keys and a
// flat head many, without a top-k. Query heads that share a KV head also share its reads: the KV head keeps the union of
// their keys. Attention over the kept keys is exact and never rescaled.
//
// Beyond the paper: a strongly attended key also keeps the halo_len keys after it. A head that copies (an induction head)
// attends one key now and the next key at the next step, and no earlier query had reason to attend that next key. Without
// the halo the first digit of a number is found again and the second is not. Strong keys are few, so the halo costs little.
#include "lib/select/hgca.h"

#include <algorithm>
#include <cmath>

#include "lib/store/cache.h"

namespace tandem {
namespace {

constexpr float kStrong = 0.01f;  // moving average of a strong key; at most 100 keys of a head exceed it

// While a selection grows, its rows are copied to a larger buffer. One KV head has both buffers at that time.
SelectorBytes bytes_of(const Layer& layer, const PolicyOptions& options, size_t, int64_t kv_len) {
  const int64_t key_bytes = plane_bytes(layer).total(), host_len = std::max<int64_t>(0, kv_len - options.window_len);
  const int64_t n_tokens = (kv_len + Maw::kBlock - 1) / Maw::kBlock * Maw::kBlock;
  return {n_tokens * (layer.n_q_heads + layer.n_kv_heads) * 4, host_len * layer.n_kv_heads * key_bytes,
          host_len * key_bytes};
}

// Counts the held queries now. The device has already counted them in the window's keys, whether their tokens are kept or
// not.
void count_held_of_device(HgcaState& state, const Sequence& sequence) {
  if (state.held.n == 0) return;
  try {
    state.keys.fill(state.hgca.cache(), sequence, state.hgca.layer_idx(), 0,
                    sequence.lengths[static_cast<size_t>(state.hgca.layer_idx())]);
    state.reserve_work();
    state.count_held();
  } catch (const std::bad_alloc&) {
    state.held.clear();
    state.hgca.cache().engine().log(TANDEM_LOG_WARNING,
                                    "no memory to count an append's attention weights: they are forgotten");
  }
}

}  // namespace

int64_t hgca_select(const SelectInput& input, int32_t* kept) {
  const PolicyOptions& options = *input.options;
  const int64_t size = std::max<int64_t>(1, input.eviction ? options.window_len : input.host_len);
  const float threshold = options.beta / static_cast<float>(size);
  int64_t n_kept = 0, halo_left = *input.halo_left;
  for (int64_t j = 0; j < input.n_tokens; ++j) {
    float most = 0.0f;
    for (int32_t g = 0; g < input.group_size; ++g) most = std::max(most, input.maw[g][j]);
    if (most > threshold && most > kStrong) halo_left = std::max(halo_left, options.halo_len + 1);
    if (most > threshold || halo_left > 0) kept[n_kept++] = static_cast<int32_t>(j);
    halo_left = std::max<int64_t>(0, halo_left - 1);
  }
  *input.halo_left = halo_left;
  return n_kept;
}

const Policy kPolicyHgca = {
    .name = "hgca",
    .keeps_maw = true,
    .host_keys = [](bool is_append) { return is_append ? HostKeys::kAll : HostKeys::kSelected; },
    .make = [](const SelectorSetup& setup) -> std::unique_ptr<Selector> { return std::make_unique<Hgca>(setup); },
    .bytes = bytes_of,
};

Hgca::Hgca(const SelectorSetup& setup) : setup_(setup), layer_(setup.cache->layers()[setup.layer_idx]) {}

const Backend& Hgca::cpu() const { return cache().engine().cpu(); }

int64_t Hgca::evicted_to(int64_t window_begin, int64_t length) const {
  return outside_window(options().window_len, cache().page_len(), length, window_begin);
}

HgcaState::HgcaState(Hgca& of) : hgca(of), heads(static_cast<size_t>(of.layer().n_kv_heads)) {
  maw_rows.resize(static_cast<size_t>(of.layer().n_q_heads));
  job.context = this;
}

// Indices grow first. If they fail, the capacity of the MAW is still too small, so a later call tries again.
Status HgcaState::grow(int64_t n_tokens, const Watch& watch) {
  join(watch);
  TANDEM_TRY(watch.check());
  Tier& tier = hgca.cache().host_tier();
  for (HeadSelection& head : heads) TANDEM_TRY(head.reserve(tier, (n_tokens + Maw::kBlock - 1) / Maw::kBlock * Maw::kBlock));
  return maw.reserve(tier, hgca.layer().n_q_heads, n_tokens, watch);
}

Status HgcaState::copy_from(const SelectState& other) {
  const auto& from = static_cast<const HgcaState&>(other);
  Tier& tier = hgca.cache().host_tier();
  TANDEM_TRY(maw.copy_from(tier, from.maw));
  for (size_t h = 0; h < heads.size(); ++h) TANDEM_TRY(heads[h].copy_from(tier, plane_bytes(hgca.layer()), from.heads[h]));
  return {};
}

// Tokens that come back into the window leave the selections. All data of tokens that are cut off is dropped.
void HgcaState::cut(const Sequence& sequence, int64_t n_tokens, int64_t window_begin) {
  guess = {};
  join();
  if (is_unjudged) count_held_of_device(*this, sequence);
  held.cut(n_tokens);
  maw.clear(hgca.layer().n_q_heads, n_tokens, sequence.longest());
  for (HeadSelection& head : heads) head.cut(window_begin);
}

void HgcaState::erase(const Sequence& sequence, int64_t first, int64_t n_tokens) {
  maw.erase(hgca.layer().n_q_heads, first, n_tokens, sequence.lengths[static_cast<size_t>(hgca.layer_idx())]);
  for (HeadSelection& head : heads) head.erase(plane_bytes(hgca.layer()), first, n_tokens, hgca.options().sink_len);
}

Status HgcaState::catch_up(const Sequence& sequence, int64_t window_begin) {
  join();
  if (!due) return {};
  keys.fill(hgca.cache(), sequence, hgca.layer_idx(), 0, sequence.lengths[static_cast<size_t>(hgca.layer_idx())]);
  reserve_work();
  host_end = window_begin;
  re_evaluate();
  is_unjudged = false;
  return {};
}

int64_t HgcaState::join(const Watch& watch) {
  Engine& engine = hgca.cache().engine();
  const int64_t waited_ns = engine.worker().join(job, watch);
  if (uncopied.exchange(false))
    engine.log(TANDEM_LOG_WARNING, "no memory for a copy of the selected keys: they are read from the store");
  return waited_ns;
}

void HgcaState::cancel() { hgca.cache().engine().worker().cancel(job); }

SelectedTokens HgcaState::selected(int32_t kv_head) const {
  const HeadSelection& head = heads[static_cast<size_t>(kv_head)];
  SelectedTokens tokens{{head.token_idx.as<int32_t>(), static_cast<size_t>(head.n_tokens)}, {}};
  if (head.n_copied == head.n_tokens) tokens.copies = head.blocks;
  return tokens;
}

// An append continues with the held queries of earlier appends, unless a device has counted these in some of the keys.
Status HgcaState::prepare_on_host(SequenceCall* call, bool is_speculative) {
  const int64_t window_begin = call->state->window_begin;
  if (!call->is_append || is_unjudged) TANDEM_TRY(catch_up(*call->sequence, window_begin));
  const auto n_q_heads = static_cast<size_t>(hgca.layer().n_q_heads);
  if (is_speculative) {
    guess.q.clear();
    guess.first_key = call->resident_begin;
    guess.n_keys = call->length - call->resident_begin;
    guess.logits.resize(n_q_heads * static_cast<size_t>(call->q_len * guess.n_keys));
    guess.lse.resize(n_q_heads * static_cast<size_t>(call->q_len));
    call->logits = guess.logits.data();
    return {};
  }
  if (call->is_append) held.reserve(hgca.layer(), hgca.n_counted());
  if (!call->is_append && hgca.evicted_to(window_begin, call->length) == window_begin) return {};
  keys.fill(hgca.cache(), *call->sequence, hgca.layer_idx(), call->is_append || wants_all ? 0 : window_begin, call->length);
  reserve_work();
  return {};
}

// While calls are in flight, the device's thread owns the state. late: gets the keys as they are now.
void HgcaState::prepare_on_device(SequenceCall* call, bool is_speculative, TicketCopy* late, int64_t* n_evicted) {
  const Layer& layer = hgca.layer();
  if (is_speculative) {
    const auto n_rows = static_cast<size_t>(call->q_len * layer.n_q_heads);
    guess.q.resize(n_rows * static_cast<size_t>(layer.k_head_dim));
    guess.lse.resize(n_rows);
  }
  // Nothing leaves the window before a guess is committed. Queries of existing tokens may all be older than the window. Then
  // nothing leaves it either.
  const bool evicts = !is_speculative;
  const int64_t evicted = evicts ? std::min(hgca.evicted_to(call->state->window_begin, call->length), call->length) : 0;
  call->evict_end = std::max(evicted, call->resident_begin);
  call->first_evicted = *n_evicted;
  *n_evicted += call->evict_end - call->resident_begin;
  call->flushes = !call->is_append && is_unjudged;
  const bool needs_all = call->is_append || call->flushes || wants_all;
  if (call->is_append || call->flushes || (evicts && call->evict_end > call->foreign_begin))
    late->keys.fill(hgca.cache(), *call->sequence, hgca.layer_idx(), needs_all ? 0 : call->foreign_begin, call->length);
  if (call->is_append) held.reserve(layer, hgca.n_counted());
}

// Waits for background work. Judges all keys now if appends on the device have left that to this query.
void HgcaState::select(const SequenceCall& call, TicketCopy* late) {
  join();
  if (!call.flushes || !due) return;
  take_keys(&late->keys);
  host_end = call.foreign_begin;
  re_evaluate();
}

void HgcaState::committed(const SequenceCall& call, bool is_speculative) {
  if (call.is_on_device()) {
    is_unjudged = (!is_speculative && call.is_append) || (is_unjudged && !call.flushes);
    return;
  }
  if (is_speculative) return;
  host_end = call.state->window_begin;
  if (!call.is_append && host_end != call.window_begin) post_eviction(call.window_begin, host_end);
}

// Does short work at once: handing it over would need a wake-up, and the engine's thread yields to others.
void HgcaState::finish(const SequenceCall& call, const Watch& watch) {
  constexpr int64_t kShort = int64_t{1} << 28;  // multiply-adds; some milliseconds
  if (!call.is_append) return;
  const int64_t n_rows = held.n * hgca.layer().n_q_heads;
  if (watch.cancel == nullptr || n_rows * call.length * hgca.layer().k_head_dim < kShort) return re_evaluate();
  job.run = [](void* state) { static_cast<HgcaState*>(state)->re_evaluate(); };
  job.is_long = true;
  hgca.cache().engine().worker().post(job);
  (void)hgca.cache().engine().worker().join(job, watch);
}

}  // namespace tandem
