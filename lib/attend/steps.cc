// SPDX-License-Identifier: MIT
#include "lib/attend/steps.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "lib/attend/searched_keys.h"
#include "lib/attend/session_states.h"
#include "lib/machine/device_status.h"

namespace tandem {

Status Steps::find_sequences(std::span<const int64_t> sequences, const int64_t* q_lens,
                             std::vector<OpenStep::Sequence>* step) {
  Cache& cache = *core_.cache;
  found_.clear();
  step->reserve(sequences.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence* sequence = nullptr;
    TANDEM_TRY(cache.find_free(sequences[i], nullptr, &sequence, "sequences"));
    TANDEM_TRY(cache.check_even(*sequence, "sequences"));
    step->push_back({sequences[i], q_lens[i], sequence->reserved, sequence->lengths[0]});
    found_.push_back(sequence);
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    const int64_t length = (*step)[i].length;
    if (q_lens[i] <= INT32_MAX - length) continue;
    const std::string field = element_name("q_lens", static_cast<int64_t>(i));
    return fail(TANDEM_ERROR_CAPACITY, field.c_str(), "%s = %lld makes a sequence of %lld tokens longer than 2^31 - 1",
                field.c_str(), static_cast<long long>(q_lens[i]), static_cast<long long>(length));
  }
  for (size_t i = 0; i < sequences.size(); ++i)
    TANDEM_TRY(cache.ensure(*found_[i], (*step)[i].length + q_lens[i], "q_lens"));
  return {};
}

Status Steps::begin(std::span<const int64_t> sequences, const int64_t* q_lens, void* stream) {
  Cache& cache = *core_.cache;
  OpenStep& open = core_.step;
  const auto lock = cache.lock_settled(core_.states);
  if (open.is_open) return fail(TANDEM_ERROR_INVALID_STATE, "session", "a step is open already");
  if (core_.device != nullptr && stream != nullptr) {
    TANDEM_TRY(core_.hand_over().take_bad_index());
    TANDEM_TRY(core_.states->meet_fault(stream));  // before lost data is read
  }
  if (core_.device != nullptr && !core_.hand_over().fault().ok())
    cache.settle(*core_.states);  // lengths may have been rolled back
  std::vector<OpenStep::Sequence> step;
  TANDEM_TRY(find_sequences(sequences, q_lens, &step));
  open.sequences.swap(step);
  if (stream != nullptr) {
    if (Status status = plan_.make(found_, stream); !status.ok()) {
      open.sequences.clear();
      return status;
    }
  }
  for (size_t i = 0; i < found_.size(); ++i) {
    found_[i]->writer = core_.states;
    found_[i]->reserved = std::max(found_[i]->reserved, open.sequences[i].length + q_lens[i]);
  }
  open.is_open = true;
  const Backend& cpu = cache.engine().cpu();
  if (open.is_planned || core_.keeps_awake) cpu.table->wake(cpu.self);
  return {};
}

Steps::Missing Steps::find_missing(const std::vector<OpenStep::Sequence>& sequences) const {
  for (const OpenStep::Sequence& step : sequences) {
    const Sequence& sequence = *core_.cache->find(step.id);
    for (size_t l = 0; l < sequence.lengths.size(); ++l) {
      const int64_t n_got = sequence.total(l) - step.length;
      if (n_got != step.q_len) return {true, step.id, l, n_got, step.q_len};
    }
  }
  return {};
}

void Steps::take_back(const std::vector<OpenStep::Sequence>& ended) {
  Cache& cache = *core_.cache;
  cache.settle(*core_.states);
  for (const OpenStep::Sequence& step : ended) {
    Sequence& sequence = *cache.find(step.id);
    cache.truncate_locked(sequence, std::min(step.length, sequence.shortest()), step.reserved);
  }
}

Status Steps::end(void* stream) {
  OpenStep& open = core_.step;
  std::unique_lock lock(core_.cache->mutex());
  if (!open.is_open) return fail(TANDEM_ERROR_INVALID_STATE, "session", "no step is open");
  const bool is_planned = open.is_planned;
  // On another stream, the mark of the step's end could come before its layers and roll them back.
  if (void* const begun_on = is_planned ? open.stream : nullptr; stream != begun_on)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream", "stream = %p, the step was begun on %p", stream, begun_on);
  Status ended;
  if (is_planned) {
    ended = end_plan(stream);
    if (open.is_planned) return ended;
  }
  const bool has_failed = is_planned && ended.ok() && open.has_failed();  // its rows may all have arrived
  const Missing missing = find_missing(open.sequences);
  // Closed before anything allocates: even if the rest fails, no step is open.
  const std::vector<OpenStep::Sequence> sequences = std::exchange(open.sequences, {});
  for (const OpenStep::Sequence& step : sequences) core_.cache->find(step.id)->writer = nullptr;
  open.is_open = false;
  const Backend& cpu = core_.cache->engine().cpu();
  if (!is_planned && core_.keeps_awake) cpu.table->rest(cpu.self);
  if (!has_failed && !missing.any) return ended;
  take_back(sequences);
  if (is_planned) TANDEM_TRY(core_.hand_over().fault());
  if (has_failed) return fail(TANDEM_ERROR_INVALID_STATE, "layer_idx", "layer %d of the step has failed", open.next_layer);
  return fail(TANDEM_ERROR_INVALID_STATE, "q_lens", "layer %zu of sequence %lld got %lld of the step's %lld tokens",
              missing.layer_idx, static_cast<long long>(missing.sequence), static_cast<long long>(missing.n_got),
              static_cast<long long>(missing.n_declared));
}

// The mark on the stream tells the host thread that the step has ended. If it cannot be launched, the step stays open.
Status Steps::end_plan(void* stream) {
  OpenStep& open = core_.step;
  DeviceSession& device = *core_.device;
  bool captures = false;
  Status ended = is_capturing(device.device(), stream, &captures);
  if (ended.ok() && captures)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream", "stream = %p is being captured: steps end outside", stream);
  const auto searches = [](const Policy& policy) { return policy.prunes; };
  if (ended.ok() && core_.policies.any(searches)) ended = follow_searches(core_, stream);
  if (ended.ok()) ended = device.end_step(open.n_planned, stream);
  if (!ended.ok() && ended.code() != TANDEM_ERROR_DEVICE_LOST && device.hand_over().fault().ok()) return ended;
  device.hand_over().close_step();
  open.is_planned = false;
  return ended;
}

}  // namespace tandem
