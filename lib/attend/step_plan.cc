// SPDX-License-Identifier: MIT
#include "lib/attend/step_plan.h"

#include <algorithm>
#include <cstring>

#include "lib/attend/descriptors.h"
#include "lib/attend/device_chunk.h"
#include "lib/attend/device_launch.h"
#include "lib/attend/pattern_call.h"
#include "lib/attend/search_call.h"
#include "lib/attend/session_states.h"
#include "lib/base/set_if_other.h"
#include "lib/machine/device_status.h"

namespace tandem {

Status StepPlan::check(void* stream) const {
  if (!core_.routes.plans_steps())
    return fail(TANDEM_ERROR_UNSUPPORTED, "route", "route = \"%s\": planned steps take \"host\" or \"auto\"",
                core_.routes.name);
  for (const SessionLayer& layer : core_.layers) {
    TANDEM_TRY(check_searched(layer));
    TANDEM_TRY(check_patterns(core_, layer));
  }
  if (core_.step.sequences.empty())
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "n_sequences", "n_sequences = 0: a step on a stream has one at least");
  bool captures = false;
  TANDEM_TRY(core_.need_device());
  TANDEM_TRY(is_capturing(core_.device->device(), stream, &captures));
  if (captures)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream", "stream = %p is being captured: steps begin outside", stream);
  return {};
}

Status StepPlan::check_lengths(const CallShape& shape) const {
  const OpenStep& open = core_.step;
  int64_t most = 0;
  const int64_t wanted = core_.terms().takes_single_queries(shape) ? 1 : kMostTicketTokens;
  TANDEM_TRY(core_.device->most_queries(shape.layer_idx, wanted, &most));
  const SessionLayer& layer = core_.layers[shape.layer_idx];
  if (layer.policy.names_keys()) most = 1;
  for (const OpenStep::Sequence& step : open.sequences)
    TANDEM_TRY(check_resident(core_, layer, step.length + step.q_len, true));
  if (open.max_q_len <= most && open.n_tokens <= kMostStepTokens) return {};
  return fail(TANDEM_ERROR_CAPACITY, "q_lens", "q_lens: up to %lld of %lld tokens in all; a planned step takes %lld of %lld",
              static_cast<long long>(open.max_q_len), static_cast<long long>(open.n_tokens), static_cast<long long>(most),
              static_cast<long long>(kMostStepTokens));
}

// Reserves windows and work space for the step. Layers that are alike take the same.
Status StepPlan::reserve(void* stream) {
  const OpenStep& open = core_.step;
  const SizeTerms terms = core_.terms();
  shapes_.assign(sequences_.size(), {});
  states_.resize(sequences_.size());
  for (size_t i = 0; i < sequences_.size(); ++i) {
    shapes_[i].q_len = open.sequences[i].q_len;
    shapes_[i].has_gaps = !sequences_[i]->positions.empty();
  }
  const auto for_kinds = [&](auto visit) -> Status {
    for (const SessionLayer& layer : core_.layers) {
      if (layer.like != layer.idx) continue;
      CallShape shape{&layer.layer, layer.idx, shapes_, open.max_q_len};
      shape.most_tokens = kMostStepTokens;
      shape.held_sequences = core_.device->held().step_sequences;
      TANDEM_TRY(visit(shape));
    }
    return {};
  };
  TANDEM_TRY(for_kinds([&](const CallShape& shape) { return check_lengths(shape); }));
  for (size_t i = 0; i < sequences_.size(); ++i) {
    const Sequence& sequence = *sequences_[i];
    TANDEM_TRY(
        core_.states->reserve_window(sequence, open.max_q_len, open.sequences[i].length + shapes_[i].q_len, &states_[i]));
    shapes_[i].window_pages = states_[i]->window.n_pages();
  }
  Reservation needs;
  TANDEM_TRY(for_kinds([&](const CallShape& shape) {
    needs.include(reserve_call(terms, shape, {}));
    return Status();
  }));
  return core_.device->hold(needs, stream);
}

// Finds for each layer the first layer that it may follow. When a step begins, all layers of a sequence have the same
// length, pages and positions, so only the windows are compared.
void StepPlan::find_first() {
  const size_t n_layers = core_.layers.size();
  first_.resize(n_layers);
  leads_.assign(n_layers, false);
  n_followers_.assign(n_layers, 0);
  for (size_t l = 0; l < n_layers; ++l) first_[l] = core_.layers[l].policy.make != nullptr ? l : core_.layers[l].like;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    if (shapes_[i].q_len == 0) continue;
    const DeviceWindow& window = states_[i]->window;
    const LayerState* const layers = states_[i]->layers.data();
    for (size_t l = 0; l < n_layers; ++l) {
      const size_t first = first_[l];
      if (layers[l].window_begin != layers[first].window_begin || !window.are_alike(l, first)) first_[l] = l;
    }
  }
}

Status StepPlan::make(std::span<Sequence* const> sequences, void* stream) {
  TANDEM_TRY(check(stream));
  OpenStep& open = core_.step;
  DeviceSession& device = *core_.device;
  HandOver& hand_over = device.hand_over();
  sequences_ = sequences;
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
  // Waits for room for the step's tasks. The earlier step at this place has finished then, as there are more places than
  // steps whose tasks fit in the ring: its upload has arrived, and its calls are no longer read.
  hand_over.next_task(n_layers - 1);
  TANDEM_TRY(core_.states->meet_fault(stream));  // fails if the earlier step is lost
  upload_ = device.shared().step_upload(step);
  AttendArgs args;
  TensorView appended;  // says that rows are appended; the kernels of each layer get the tensor
  args.k = &appended;
  args.on_device = true;
  args.stream = stream;
  TANDEM_TRY(plan_layers(&args));
  TANDEM_TRY(join_side(device, stream));
  const int64_t bytes = device.steps().tables_at() + n_entries_ * static_cast<int64_t>(sizeof(int64_t));
  TANDEM_TRY(call_device(device.device(), &DeviceTable::copy, device.work().step_descriptors(), upload_, bytes, stream));
  TANDEM_TRY(bound_chunks_of_layers(&args));
  commit(&args);
  open.n_planned = step;
  open.is_planned = true;
  hand_over.open_step(n_layers);
  return {};
}

// Makes the bounds of keys from before the step, if they fill more than one chunk.
Status StepPlan::bound_chunks_of_layers(AttendArgs* args) {
  for (size_t l = 0; l < first_.size(); ++l) {
    if (!core_.layers[l].policy.prunes) continue;
    args->layer_idx = static_cast<int32_t>(l);
    HandOverTask& task = core_.hand_over().next_task(static_cast<int64_t>(l));
    const Call call(core_, *args, task.scratch, &task);
    TANDEM_TRY(bound_chunks(call, step_sequences(call)));
  }
  return {};
}

Status StepPlan::plan_layers(AttendArgs* args) {
  HandOver& hand_over = core_.hand_over();
  find_first();
  n_entries_ = 0;
  for (size_t l = 0; l < first_.size(); ++l) {
    HandOverTask& task = hand_over.next_task(static_cast<int64_t>(l));
    task.step = core_.step.n_planned + 1;
    args->layer_idx = static_cast<int32_t>(l);
    Call call(core_, *args, task.scratch, &task);
    if (first_[l] != l && leads_[first_[l]]) {
      follow(call);
      continue;
    }
    first_[l] = l;
    TANDEM_TRY(plan_layer(call));
  }
  return {};
}

Status StepPlan::plan_layer(Call& call) {
  TANDEM_TRY(add_sequences(call));
  TANDEM_TRY(lane_.prepare(call));
  const int64_t filled_before = core_.sums.filled_kv_bytes;
  TANDEM_TRY(lane_.fill(call));
  const bool has_filled = core_.sums.filled_kv_bytes != filled_before;  // then the windows of other layers lack rows, too
  const auto has_host = [](const SequenceCall& of) { return of.has_host; };
  leads_[call.facts.idx] =
      !has_filled && call.facts.policy.make == nullptr && std::none_of(call.calls().begin(), call.calls().end(), has_host);
  describe(call);
  return {};
}

Status StepPlan::add_sequences(Call& call) const {
  std::vector<SequenceCall>& calls = call.calls();
  calls.clear();
  int64_t first_row = 0;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    const int64_t q_len = shapes_[i].q_len;
    if (q_len == 0) continue;
    SequenceCall& of = calls.emplace_back();
    of.sequence = sequences_[i];
    of.q_len = q_len;
    of.first_row = first_row;
    first_row += q_len;
    of.first_query = of.sequence->lengths[call.facts.idx];
    of.length = of.first_query + q_len;
    of.is_append = q_len > 1;
    of.sequence->extend_positions(of.length);
    TANDEM_TRY(lane_.take_state(call, *states_[i], &of));
  }
  return {};
}

// Describes missing sequences as having no queries, as a graph may have been captured for more sequences.
void StepPlan::describe(Call& call) {
  const StepLayout layout = core_.device->steps();
  const size_t l = call.facts.idx;
  auto* const to = reinterpret_cast<DeviceSequence*>(upload_ + layout.layer_at(l));
  describe_sequences(call, to);
  if (call.facts.policy.prunes) describe_search(call, {}, to);
  std::byte* const end = upload_ + layout.layer_at(l + 1);
  std::fill(reinterpret_cast<std::byte*>(to + call.calls().size()), end, std::byte{0});
  to->step = call.task->step_tag();
  auto* const lists = reinterpret_cast<DeviceKeys*>(upload_ + layout.lists_at(l));
  const int64_t n_lists = describe_lists(call, lists, core_.device->held().step_sequences);
  std::fill(reinterpret_cast<std::byte*>(lists + n_lists), upload_ + layout.lists_at(l + 1), std::byte{0});
  if (n_entries_ == 0) n_entries_ = describe_tables(call, reinterpret_cast<int64_t*>(upload_ + layout.tables_at()));
}

void StepPlan::follow(const Call& call) {
  const StepLayout layout = core_.device->steps();
  const size_t l = call.facts.idx, first = first_[l];
  share_task(call, core_.hand_over().next_task(static_cast<int64_t>(first)), calls_of(first));
  std::memcpy(upload_ + layout.layer_at(l), upload_ + layout.layer_at(first), static_cast<size_t>(layout.layer_at(1)));
  ++n_followers_[first];
}

void StepPlan::commit(AttendArgs* args) {
  for (size_t l = 0; l < first_.size(); ++l) {
    if (first_[l] != l) continue;
    args->layer_idx = static_cast<int32_t>(l);
    HandOverTask& task = core_.hand_over().next_task(static_cast<int64_t>(l));
    Call call(core_, *args, task.scratch, &task);
    call.n_layers = 1 + n_followers_[l];
    commit_sequences(call);
    if (call.n_layers == 1) continue;
    commit_followers(call);
    give_calls(call);
  }
}

// Goes sequence by sequence, as the data of a sequence's layers is contiguous.
void StepPlan::commit_followers(const Call& call) {
  const size_t first = call.facts.idx;
  followers_.clear();
  for (size_t l = first + 1; l < first_.size(); ++l)
    if (first_[l] == first) followers_.push_back(l);
  for (const SequenceCall& of : call.calls()) {
    of.window->follow(first, followers_);
    int64_t* const lengths = of.sequence->lengths.data();
    LayerState* const states = of.state - first;
    const int64_t length = of.length, window_begin = of.state->window_begin;
    for (const size_t l : followers_) lengths[l] = length;
    for (const size_t l : followers_) set_if_other(states[l].window_begin, window_begin);
  }
}

// Returns where the step keeps the calls of a layer that others follow. They cannot stay in that layer's task: another step
// may reuse its place in the ring before the last follower's task has ended.
StepCalls* StepPlan::calls_of(size_t layer_idx) {
  const auto n_steps = static_cast<uint64_t>(core_.device->shared().n_steps);
  if (core_.step_calls.empty()) core_.step_calls.resize(n_steps * first_.size());
  return &core_.step_calls[(core_.step.n_planned + 1) % n_steps * first_.size() + layer_idx];
}

void StepPlan::give_calls(const Call& call) {
  StepCalls* const to = calls_of(call.facts.idx);
  to->calls.swap(call.scratch.calls);
  to->begin.swap(call.scratch.begin);
  to->end.swap(call.scratch.end);
  to->touched.swap(call.task->touched_alone);
  call.scratch.host.rows().give(&to->rows);
  call.task->shared = to;
}

}  // namespace tandem
