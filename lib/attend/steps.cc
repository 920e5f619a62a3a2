// SPDX-License-Identifier: MIT
#include "lib/attend/steps.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "lib/attend/descriptors.h"
#include "lib/attend/device_chunk.h"
#include "lib/attend/session_states.h"
#include "lib/machine/device_status.h"

namespace tandem {

Status Steps::find_sequences(std::span<const int64_t> sequences, const int64_t* q_lens, std::vector<Sequence*>* found,
                             std::vector<OpenStep::Sequence>* step) {
  Cache& cache = *core_.cache;
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence* sequence = nullptr;
    TANDEM_TRY(cache.find_free(sequences[i], nullptr, &sequence, "sequences"));
    TANDEM_TRY(cache.check_even(*sequence, "sequences"));
    step->push_back({sequences[i], q_lens[i], sequence->reserved, sequence->lengths});
    found->push_back(sequence);
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    const int64_t length = (*found)[i]->longest();
    if (q_lens[i] <= INT32_MAX - length) continue;
    const std::string field = element_name("q_lens", static_cast<int64_t>(i));
    return fail(TANDEM_ERROR_CAPACITY, field.c_str(), "%s = %lld makes a sequence of %lld tokens longer than 2^31 - 1",
                field.c_str(), static_cast<long long>(q_lens[i]), static_cast<long long>(length));
  }
  for (size_t i = 0; i < sequences.size(); ++i)
    TANDEM_TRY(cache.ensure(*(*found)[i], (*found)[i]->longest() + q_lens[i], "q_lens"));
  return {};
}

Status Steps::begin(std::span<const int64_t> sequences, const int64_t* q_lens, void* stream) {
  Cache& cache = *core_.cache;
  OpenStep& open = core_.step;
  const auto lock = cache.lock_settled(core_.states);
  if (open.is_open) return fail(TANDEM_ERROR_INVALID_STATE, "session", "a step is open already");
  if (core_.device != nullptr && stream != nullptr) {
    TANDEM_TRY(core_.hand_over().take_bad_index());
    TANDEM_TRY(core_.states->meet_fault(stream));  // before anyone looks at what is lost
  }
  if (core_.device != nullptr && !core_.hand_over().fault().ok())
    cache.settle(*core_.states);  // lengths are not what they were
  std::vector<OpenStep::Sequence> step;
  std::vector<Sequence*> found;
  TANDEM_TRY(find_sequences(sequences, q_lens, &found, &step));
  open.sequences.swap(step);
  if (stream != nullptr) {
    if (Status status = plan(stream); !status.ok()) {
      open.sequences.clear();
      return status;
    }
  }
  for (size_t i = 0; i < found.size(); ++i) {
    found[i]->writer = core_.states;
    found[i]->reserved = std::max(found[i]->reserved, open.sequences[i].lengths[0] + q_lens[i]);
  }
  open.is_open = true;
  const Backend& cpu = cache.engine().cpu();
  if (open.is_planned || core_.keeps_awake) cpu.table->wake(cpu.self);
  return {};
}

Steps::Missing Steps::find_missing(const std::vector<OpenStep::Sequence>& sequences) const {
  for (const OpenStep::Sequence& step : sequences)
    for (size_t l = 0; l < step.lengths.size(); ++l) {
      const int64_t n_got = core_.cache->find(step.id)->total(l) - step.lengths[l];
      if (n_got != step.q_len) return {true, step.id, l, n_got, step.q_len};
    }
  return {};
}

void Steps::take_back(const std::vector<OpenStep::Sequence>& ended) {
  Cache& cache = *core_.cache;
  cache.settle(*core_.states);
  for (const OpenStep::Sequence& step : ended) {
    Sequence& sequence = *cache.find(step.id);
    const int64_t begun = *std::min_element(step.lengths.begin(), step.lengths.end());
    cache.truncate_locked(sequence, std::min(begun, sequence.shortest()), step.reserved);
  }
}

Status Steps::end(void* stream) {
  OpenStep& open = core_.step;
  std::unique_lock lock(core_.cache->mutex());
  if (!open.is_open) return fail(TANDEM_ERROR_INVALID_STATE, "session", "no step is open");
  const bool is_planned = open.is_planned;
  // The mark that it has ended would come before its layers, and take them back.
  if (void* const begun_on = is_planned ? open.stream : nullptr; stream != begun_on)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream", "stream = %p, the step was begun on %p", stream, begun_on);
  Status ended;
  if (is_planned) {
    ended = end_plan(stream);
    if (open.is_planned) return ended;
  }
  const bool has_failed = is_planned && ended.ok() && open.has_failed();  // its rows may all have come
  const Missing missing = find_missing(open.sequences);
  // Closed before anything asks for memory: whatever fails from here on, no step is open.
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

// Without its mark on the stream nobody would know that it has ended: where there can be none, it stays open.
Status Steps::end_plan(void* stream) {
  OpenStep& open = core_.step;
  DeviceSession& device = *core_.device;
  bool captures = false;
  Status ended = is_capturing(device.device(), stream, &captures);
  if (ended.ok() && captures)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream", "stream = %p is being captured: steps end outside", stream);
  if (ended.ok()) ended = device.end_step(open.n_planned, stream);
  if (!ended.ok() && ended.code() != TANDEM_ERROR_DEVICE_LOST && device.hand_over().fault().ok()) return ended;
  device.hand_over().close_step();
  open.is_planned = false;
  return ended;
}

// Windows and work space for the step.
Status Steps::reserve(void* stream) {
  const OpenStep& open = core_.step;
  const SizeTerms terms = core_.terms();
  std::vector<SequenceShape> sequences(open.sequences.size());
  std::vector<CallShape> shapes;
  for (size_t i = 0; i < sequences.size(); ++i) {
    sequences[i].q_len = open.sequences[i].q_len;
    sequences[i].has_gaps = !core_.cache->find(open.sequences[i].id)->positions.empty();
  }
  for (size_t l = 0; l < terms.layers.size(); ++l) {
    shapes.push_back({&terms.layers[l], l, sequences, open.max_q_len});
    shapes.back().most_tokens = kMostStepTokens;
    int64_t most = 0;
    TANDEM_TRY(core_.device->most_queries(l, terms.takes_single_queries(shapes[l]) ? 1 : kMostTicketTokens, &most));
    if (open.max_q_len > most || open.n_tokens > kMostStepTokens)
      return fail(TANDEM_ERROR_CAPACITY, "q_lens",
                  "q_lens: up to %lld of %lld tokens in all; a planned step takes %lld of %lld",
                  static_cast<long long>(open.max_q_len), static_cast<long long>(open.n_tokens),
                  static_cast<long long>(most), static_cast<long long>(kMostStepTokens));
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& sequence = *core_.cache->find(open.sequences[i].id);
    TANDEM_TRY(core_.states->reserve_window(sequence, open.max_q_len, sequence.longest() + sequences[i].q_len,
                                            &sequences[i].window_pages));
  }
  Reservation needs;
  for (const CallShape& shape : shapes) needs.include(reserve_call(terms, shape, {}));
  return core_.device->hold(needs, stream);
}

Status Steps::check_plan(void* stream) const {
  if (!core_.routes.plans_steps())
    return fail(TANDEM_ERROR_UNSUPPORTED, "route", "route = \"%s\": planned steps take \"host\" or \"auto\"",
                core_.routes.name);
  for (const SessionLayer& layer : core_.layers)
    if (layer.policy.names_keys())
      return fail(TANDEM_ERROR_UNSUPPORTED, "stream",
                  "a step on a stream, and layer %zu has policy \"%s\": its queries are attended in host memory alone",
                  layer.idx, layer.policy.name);
  if (core_.step.sequences.empty())
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "n_sequences", "n_sequences = 0: a step on a stream has one at least");
  bool captures = false;
  TANDEM_TRY(core_.need_device());
  TANDEM_TRY(is_capturing(core_.device->device(), stream, &captures));
  if (captures)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream", "stream = %p is being captured: steps begin outside", stream);
  return {};
}

// The cache's mutex is held exclusively; the sequences of the step have their pages.
Status Steps::plan(void* stream) {
  TANDEM_TRY(check_plan(stream));
  OpenStep& open = core_.step;
  DeviceSession& device = *core_.device;
  HandOver& hand_over = device.hand_over();
  open.stream = stream;
  open.next_layer = open.n_appended = 0;
  open.n_tokens = open.max_q_len = 0;
  for (const OpenStep::Sequence& step : open.sequences) {
    open.n_tokens += step.q_len;
    open.max_q_len = std::max(open.max_q_len, step.q_len);
  }
  TANDEM_TRY(reserve(stream));
  const uint64_t step = open.n_planned + 1;
  const auto n_layers = static_cast<int64_t>(core_.layers.size());
  hand_over.next_task(n_layers - 1);  // waits: of the step that had this place, a ticket has arrived, and so has its upload
  TANDEM_TRY(core_.states->meet_fault(stream));  // or that step is lost
  std::byte* upload = device.shared().step_upload(step);
  std::fill_n(upload, device.steps().tables_at(), std::byte{0});
  int64_t n_entries = 0;
  AttendArgs args;
  TensorView appended;  // tells that there is something to append; where it is, kernels are told
  args.k = &appended;
  args.on_device = true;
  args.stream = stream;
  for (int32_t l = 0; l < n_layers; ++l) {
    HandOverTask& task = hand_over.next_task(l);
    task.step = step;
    args.layer_idx = l;
    n_entries = 0;
    Call call(core_, args, task.scratch, &task);
    TANDEM_TRY(plan_layer(call, upload, &n_entries));
  }
  TANDEM_TRY(join_side(device, stream));
  const int64_t bytes = device.steps().tables_at() + n_entries * static_cast<int64_t>(sizeof(int64_t));
  TANDEM_TRY(call_device(device.device(), &DeviceTable::copy, device.work().step_descriptors(), upload, bytes, stream));
  for (int32_t l = 0; l < n_layers; ++l) {
    args.layer_idx = l;
    HandOverTask& task = hand_over.next_task(l);
    Call call(core_, args, task.scratch, &task);
    commit_sequences(call);
  }
  open.n_planned = step;
  open.is_planned = true;
  hand_over.open_step(n_layers);
  return {};
}

// upload: of the step, on its way to the device. *n_entries: of its page tables, which all layers share.
Status Steps::plan_layer(Call& call, std::byte* upload, int64_t* n_entries) {
  const size_t l = call.facts.idx;
  const StepLayout layout = core_.device->steps();
  std::vector<SequenceCall>& calls = call.calls();
  calls.clear();
  int64_t first_row = 0;
  for (const OpenStep::Sequence& step : core_.step.sequences) {
    SequenceCall of;
    of.sequence = core_.cache->find(step.id);
    of.q_len = step.q_len;
    of.first_row = first_row;
    first_row += step.q_len;
    if (of.q_len == 0) continue;
    of.first_query = of.sequence->lengths[l];
    of.length = of.first_query + of.q_len;
    of.is_append = of.q_len > 1;
    of.sequence->extend_positions(of.length);
    TANDEM_TRY(lane_.find_state(call, &of));
    calls.push_back(of);
  }
  TANDEM_TRY(lane_.prepare(call));
  TANDEM_TRY(lane_.fill(call));
  auto* const to = reinterpret_cast<DeviceSequence*>(upload + layout.layer_at(l));
  describe_sequences(call, to, reinterpret_cast<int64_t*>(upload + layout.tables_at()), n_entries);
  describe_lists(call, reinterpret_cast<DeviceKeys*>(upload + layout.lists_at(l)));
  to->step = call.task->step_tag();
  return {};
}

}  // namespace tandem
