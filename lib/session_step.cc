// SPDX-License-Identifier: MIT
// Steps, and the end of speculation.
#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "lib/session.h"

namespace tandem {

Status Session::step_begin(const int64_t* sequences, const int64_t* q_lens, int32_t n_sequences, void* stream) {
  const auto lock = cache_->lock_settled(this);
  if (in_step_) return fail(TANDEM_ERROR_INVALID_STATE, "session", "a step is open already");
  if (device_ != nullptr && stream != nullptr) TANDEM_TRY(meet_fault(stream));  // before anyone looks at what is lost
  if (device_ != nullptr && !device_->hand_over().fault().ok()) cache_->settle(*this);  // lengths are not what they were
  std::vector<StepSequence> step;
  std::vector<Sequence*> found;
  for (int32_t i = 0; i < n_sequences; ++i) {
    Sequence* sequence = nullptr;
    TANDEM_TRY(cache_->find_free(sequences[i], nullptr, &sequence, "sequences"));
    TANDEM_TRY(cache_->check_even(*sequence, "sequences"));
    step.push_back({sequences[i], q_lens[i], sequence->reserved, sequence->lengths});
    found.push_back(sequence);
  }
  for (int32_t i = 0; i < n_sequences; ++i) {
    const int64_t length = found[static_cast<size_t>(i)]->longest();
    if (q_lens[i] <= INT32_MAX - length) continue;
    const std::string field = element_name("q_lens", i);
    return fail(TANDEM_ERROR_CAPACITY, field.c_str(), "%s = %lld makes a sequence of %lld tokens longer than 2^31 - 1",
                field.c_str(), static_cast<long long>(q_lens[i]), static_cast<long long>(length));
  }
  for (int32_t i = 0; i < n_sequences; ++i)
    TANDEM_TRY(
        cache_->ensure(*found[static_cast<size_t>(i)], found[static_cast<size_t>(i)]->longest() + q_lens[i], "q_lens"));
  step_.swap(step);
  if (stream != nullptr) {
    if (Status status = plan_step(stream); !status.ok()) {
      step_.clear();
      return status;
    }
  }
  for (size_t i = 0; i < found.size(); ++i) {
    found[i]->writer = this;
    found[i]->reserved = std::max(found[i]->reserved, step_[i].lengths[0] + q_lens[i]);
  }
  in_step_ = true;
  const Backend& cpu = cache_->engine().cpu();
  if (plan_.is_open || keeps_awake_) cpu.table->wake(cpu.self);
  return {};
}

Status Session::step_end(void* stream) {
  std::unique_lock lock(cache_->mutex());
  if (!in_step_) return fail(TANDEM_ERROR_INVALID_STATE, "session", "no step is open");
  const bool is_planned = plan_.is_open;
  // The mark that it has ended would come before its layers, and take them back.
  if (void* const begun_on = is_planned ? plan_.stream : nullptr; stream != begun_on)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream", "stream = %p, the step was begun on %p", stream, begun_on);
  Status ended;
  if (is_planned) {
    ended = end_plan(stream);
    if (plan_.is_open) return ended;
  }
  // The error is built last: closing the step must not depend on memory for its text.
  const bool has_failed = is_planned && ended.ok() && plan_.has_failed();  // its rows may all have come
  bool complete = !has_failed;
  long long id = 0, n_got = 0, n_declared = 0;
  size_t layer_idx = 0;
  for (const StepSequence& step : step_) {
    const Sequence& sequence = *cache_->find(step.id);
    for (size_t l = 0; complete && l < step.lengths.size(); ++l) {
      n_got = sequence.total(l) - step.lengths[l];
      complete = n_got == step.q_len;
      if (!complete) id = step.id, n_declared = step.q_len, layer_idx = l;
    }
  }
  // Closed before anything asks for memory: whatever fails from here on, no step is open.
  const std::vector<StepSequence> ended_step = std::exchange(step_, {});
  for (const StepSequence& step : ended_step) cache_->find(step.id)->writer = nullptr;
  in_step_ = false;
  const Backend& cpu = cache_->engine().cpu();
  if (!is_planned && keeps_awake_) cpu.table->rest(cpu.self);
  if (!complete) cache_->settle(*this);
  for (const StepSequence& step : ended_step) {
    Sequence& sequence = *cache_->find(step.id);
    const int64_t begun = *std::min_element(step.lengths.begin(), step.lengths.end());
    if (!complete) cache_->truncate_locked(sequence, std::min(begun, sequence.shortest()), step.reserved);
  }
  if (complete) return ended;
  if (is_planned) TANDEM_TRY(device_->hand_over().fault());
  if (has_failed) return fail(TANDEM_ERROR_INVALID_STATE, "layer_idx", "layer %d of the step has failed", plan_.next_layer);
  return fail(TANDEM_ERROR_INVALID_STATE, "q_lens", "layer %zu of sequence %lld got %lld of the step's %lld tokens",
              layer_idx, id, n_got, n_declared);
}

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
  const auto lock = cache_->lock_settled();
  Sequence* sequence = nullptr;
  TANDEM_TRY(cache_->find_free(id, this, &sequence));
  TANDEM_TRY(check_chain(*sequence, kept_idx, n_kept));
  SequenceState* found = state(id);
  if (found == nullptr || sequence->speculator != this)
    return fail(TANDEM_ERROR_INVALID_STATE, "sequence", "sequence = %lld has no speculative tokens of this session",
                static_cast<long long>(id));
  const int64_t length = sequence->lengths[0] + n_kept;
  fetch_maw(*sequence);
  const KeptGuess kept{*sequence, {kept_idx, static_cast<size_t>(n_kept)}};
  for (const LayerState& state : found->layers) TANDEM_TRY(state.selection->prepare_guess(kept));
  for (size_t l = 0; l < found->layers.size(); ++l) {
    const auto layer_idx = static_cast<int32_t>(l);
    LayerState& state = found->layers[l];
    const int64_t window_before = state.window_begin;
    state.selection->count_guess(kept, false, &state.window_begin);
    for (int64_t i = 0; i < n_kept; ++i)
      if (kept_idx[i] != i)
        cache_->move_row(*sequence, layer_idx, sequence->lengths[l] + kept_idx[i], sequence->lengths[l] + i);
    state.selection->count_guess(kept, true, &state.window_begin);
    if (!policies_[l].keeps_maw) evict(state, length);
    sums_.evicted_tokens += state.window_begin - window_before;
    sequence->speculative[l] = 0;
    state.selection->end_guess(window_before, state.window_begin);
  }
  sequence->parents.clear();
  sequence->speculator = nullptr;
  const auto committed = static_cast<size_t>(length - n_kept);
  if (sequence->positions.size() > committed) sequence->positions.resize(committed);
  for (size_t l = 0; l < found->layers.size(); ++l) cache_->set_length(*sequence, static_cast<int32_t>(l), length);
  return {};
}

}  // namespace tandem
