// SPDX-License-Identifier: MIT
// Ends speculation: the kept tokens stay, as if they had been appended one by one.
#include <algorithm>

#include "lib/attend/session.h"

namespace tandem {
namespace {

Status check_chain(const Sequence& sequence, const int64_t* kept_idx, int64_t n_kept) {
  const int64_t n = sequence.speculative[0];
  for (size_t l = 0; l < sequence.lengths.size(); ++l)
    if (sequence.speculative[l] != n || sequence.lengths[l] != sequence.lengths[0])
      return fail(TANDEM_ERROR_INVALID_STATE, "sequence",
                  "sequence = %lld has %lld + %lld speculative tokens in layer %zu, %lld + %lld in layer 0",
                  static_cast<long long>(sequence.id), static_cast<long long>(sequence.lengths[l]),
                  static_cast<long long>(sequence.speculative[l]), l, static_cast<long long>(sequence.lengths[0]),
                  static_cast<long long>(n));
  if (n == 0)
    return fail(TANDEM_ERROR_INVALID_STATE, "sequence", "sequence = %lld has no speculative tokens",
                static_cast<long long>(sequence.id));
  for (int64_t i = 0; i < n_kept; ++i) {
    const int64_t before = i == 0 ? -1 : kept_idx[i - 1], kept = kept_idx[i];
    if (kept < 0 || kept >= n)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, "kept_idx", "kept_idx[%lld] = %lld is not in 0 to %lld",
                  static_cast<long long>(i), static_cast<long long>(kept), static_cast<long long>(n - 1));
    const int64_t parent = sequence.parents.empty() ? kept - 1 : sequence.parents[static_cast<size_t>(kept)];
    if (parent != before)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, "kept_idx",
                  "kept_idx[%lld] = %lld continues token %lld, not token %lld: no chain", static_cast<long long>(i),
                  static_cast<long long>(kept), static_cast<long long>(parent), static_cast<long long>(before));
  }
  return {};
}

}  // namespace

Status Session::commit(int64_t id, const int64_t* kept_idx, int64_t n_kept) {
  SessionCore& core = *core_;
  Cache& cache = *core.cache;
  const auto lock = cache.lock_settled();
  Sequence* sequence = nullptr;
  TANDEM_TRY(cache.find_free(id, &states_, &sequence));
  TANDEM_TRY(check_chain(*sequence, kept_idx, n_kept));
  SequenceState* found = states_.find(id);
  if (found == nullptr || sequence->speculator != &states_)
    return fail(TANDEM_ERROR_INVALID_STATE, "sequence", "sequence = %lld has no speculative tokens of this session",
                static_cast<long long>(id));
  const int64_t length = sequence->lengths[0] + n_kept;
  states_.fetch_maw(*sequence);
  const KeptGuess kept{*sequence, {kept_idx, static_cast<size_t>(n_kept)}};
  for (const LayerState& state : found->layers) TANDEM_TRY(state.selection->prepare_guess(kept));
  for (size_t l = 0; l < found->layers.size(); ++l) {
    const auto layer_idx = static_cast<int32_t>(l);
    LayerState& state = found->layers[l];
    const int64_t window_before = state.window_begin;
    state.selection->count_guess(kept, false, &state.window_begin);
    for (int64_t i = 0; i < n_kept; ++i)
      if (kept_idx[i] != i)
        move_row(cache, *sequence, layer_idx, sequence->lengths[l] + kept_idx[i], sequence->lengths[l] + i);
    state.selection->count_guess(kept, true, &state.window_begin);
    if (core.policies[l].keeps_maw)
      core.sums.evicted_tokens += state.window_begin - window_before;
    else
      core.evict(&state.window_begin, length);
    sequence->speculative[l] = 0;
    state.selection->end_guess(window_before, state.window_begin);
  }
  sequence->parents.clear();
  sequence->speculator = nullptr;
  const auto committed = static_cast<size_t>(length - n_kept);
  if (sequence->positions.size() > committed) sequence->positions.resize(committed);
  for (size_t l = 0; l < found->layers.size(); ++l) sequence->set_length(l, length);
  return {};
}

}  // namespace tandem
