// SPDX-License-Identifier: MIT
// Planned steps: all that a decode step of every layer needs on the host's side is done when the step begins, so that what
// remains is three kernels a layer, whether called one by one or replayed as a graph.
//
//   begin    of every layer: keys, rows, jobs; descriptors of all layers in one copy; lengths; all tasks posted, in order
//   attend   launches the kernels of the next layer, on descriptors whose place never changes
//   end      leaves a mark on the stream: a layer that has not come by then will not come (lib/hand_over.cc)
#include <algorithm>

#include "lib/attend_call.h"
#include "lib/device_session.h"
#include "lib/device_status.h"

namespace tandem {
namespace {

constexpr int64_t kAnyKeys = INT32_MAX;  // a window has fewer

}  // namespace

// For calls of up to q_len queries. *n_pages: of the window then.
Status Session::reserve_window(const Sequence& sequence, int64_t q_len, int64_t* n_pages) {
  TANDEM_TRY(on_reserve(sequence, sequence.longest(), {}));
  DeviceWindow& window = state(sequence.id)->window;
  const int64_t n_wanted = ring_pages(options_, cache_->page_len(), q_len);
  // Where a ring grows it keeps its last pages, which those of a layer that is behind may not be among. Rows come from the
  // store again, averages are here alone.
  const bool grows = window.n_pages() > 0 && window.n_pages() < n_wanted;
  if (grows && sequence.shortest() < sequence.longest()) fetch_maw(sequence);
  TANDEM_TRY(device_->reserve_window(window, n_wanted, sequence.longest()));
  *n_pages = window.n_pages();
  return {};
}

// Windows and work space for the step. plan_: its sizes.
Status Session::reserve_step(void* stream) {
  const SizeTerms terms = this->terms();
  std::vector<SequenceShape> sequences(step_.size());
  std::vector<CallShape> shapes;
  for (size_t i = 0; i < step_.size(); ++i) {
    sequences[i].q_len = step_[i].q_len;
    sequences[i].has_gaps = !cache_->find(step_[i].id)->positions.empty();
  }
  for (size_t l = 0; l < terms.layers.size(); ++l) {
    shapes.push_back({&terms.layers[l], l, sequences, plan_.max_q_len});
    int64_t most = 0;
    TANDEM_TRY(device_->most_queries(l, terms.takes_single_queries(shapes[l]) ? 1 : DeviceSession::kMostTokens, &most));
    if (plan_.max_q_len > most || plan_.n_tokens > DeviceSession::kMostTokens)
      return fail(TANDEM_ERROR_CAPACITY, "q_lens",
                  "q_lens: up to %lld of %lld tokens in all; a planned step takes %lld of %lld",
                  static_cast<long long>(plan_.max_q_len), static_cast<long long>(plan_.n_tokens),
                  static_cast<long long>(most), static_cast<long long>(DeviceSession::kMostTokens));
  }
  for (size_t i = 0; i < step_.size(); ++i)
    TANDEM_TRY(reserve_window(*cache_->find(step_[i].id), plan_.max_q_len, &sequences[i].window_pages));
  Reservation needs;
  for (const CallShape& shape : shapes) needs.include(reserve_call(terms, shape, {}));
  return device_->hold(needs, stream);
}

// The cache's mutex is held exclusively; the sequences of step_ have their pages.
Status Session::plan_step(void* stream) {
  if (!routes_.plans_steps())
    return fail(TANDEM_ERROR_UNSUPPORTED, "route", "route = \"%s\": planned steps take \"host\" or \"auto\"",
                name_of(routes_.route));
  if (step_.empty())
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "n_sequences", "n_sequences = 0: a step on a stream has one at least");
  if (device_ == nullptr) TANDEM_TRY(DeviceSession::create(*cache_, policies_, options_, &device_));
  HandOver& hand_over = device_->hand_over();
  bool captures = false;
  TANDEM_TRY(is_capturing(device_->device(), stream, &captures));
  if (captures)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream", "stream = %p is being captured: steps begin outside", stream);
  plan_.stream = stream;
  plan_.next_layer = plan_.n_appended = 0;
  plan_.n_tokens = plan_.max_q_len = 0;
  for (const StepSequence& step : step_) {
    plan_.n_tokens += step.q_len;
    plan_.max_q_len = std::max(plan_.max_q_len, step.q_len);
  }
  TANDEM_TRY(reserve_step(stream));
  const uint64_t step = n_planned_ + 1;
  const auto n_layers = static_cast<int64_t>(cache_->layers().size());
  hand_over.next_task(n_layers - 1);  // waits: of the step that had this place, a ticket has arrived, and so has its upload
  TANDEM_TRY(meet_fault(stream));     // or that step is lost
  std::byte* upload = device_->step_upload(step);
  std::fill_n(upload, device_->step_tables_at(), std::byte{0});
  auto* tables = reinterpret_cast<int64_t*>(upload + device_->step_tables_at());
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
    TANDEM_TRY(AttendCall(*this, args, task.scratch)
                   .plan_layer(&task, reinterpret_cast<DeviceSequence*>(upload + device_->step_layer_at(l)),
                               reinterpret_cast<DeviceSequence*>(upload + device_->step_streaming_at(l)), tables,
                               &n_entries));
  }
  const int64_t bytes = device_->step_tables_at() + n_entries * static_cast<int64_t>(sizeof(int64_t));
  TANDEM_TRY(call_device(device_->device(), &DeviceTable::copy, device_->step_descriptors(), upload, bytes, stream));
  for (int32_t l = 0; l < n_layers; ++l) {
    args.layer_idx = l;
    AttendCall(*this, args, hand_over.next_task(l).scratch).commit_chunk();
  }
  n_planned_ = step;
  plan_.is_open = true;
  hand_over.open_step(n_layers);
  return {};
}

// Without its mark on the stream nobody would know that it has ended: where there can be none, it stays open.
Status Session::end_plan(void* stream) {
  bool captures = false;
  Status ended = is_capturing(device_->device(), stream, &captures);
  if (ended.ok() && captures)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream", "stream = %p is being captured: steps end outside", stream);
  if (ended.ok()) ended = device_->end_step(n_planned_, stream);
  if (!ended.ok() && ended.code() != TANDEM_ERROR_DEVICE_LOST && device_->hand_over().fault().ok()) return ended;
  device_->hand_over().close_step();
  plan_.is_open = false;
  return ended;
}

Status AttendCall::plan_layer(HandOverTask* task, DeviceSequence* to, DeviceSequence* streaming, int64_t* tables,
                              int64_t* n_entries) {
  scratch_.calls.clear();
  int64_t first_row = 0;
  for (const Session::StepSequence& step : session_.step_) {
    SequenceCall call;
    call.sequence = cache_.find(step.id);
    call.q_len = step.q_len;
    call.first_row = first_row;
    first_row += step.q_len;
    if (call.q_len == 0) continue;
    call.first_query = call.sequence->lengths[layer_idx_];
    call.length = call.first_query + call.q_len;
    call.is_append = call.q_len > 1;
    cache_.extend_positions(*call.sequence, call.length);
    SequenceState& state = *session_.state(step.id);
    call.state = &state.layers[layer_idx_];
    call.window = &state.window;
    TANDEM_TRY(flush_host_appends(call));
    scratch_.calls.push_back(call);
  }
  prepare_chunk(task);
  for (const SequenceCall& call : scratch_.calls) TANDEM_TRY(fill_window(call));
  describe_sequences(to, tables, n_entries);
  if (heads_ != nullptr) describe_streaming_heads(to, streaming);
  to->step = task->step_tag();
  return {};
}

Status AttendCall::check_planned(bool captures) const {
  const Session::Plan& plan = session_.plan_;
  if (args_.partial)
    return fail(TANDEM_ERROR_INVALID_STATE, "flags", "flags = TANDEM_ATTEND_PARTIAL in a step that was planned as a whole");
  if (!captures && args_.stream != plan.stream)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream", "stream = %p, the step was begun on %p", args_.stream, plan.stream);
  if (args_.k == nullptr)
    return fail(TANDEM_ERROR_INVALID_STATE, "k", "k = NULL in a step that was planned with new tokens");
  if (plan.has_failed())
    return fail(TANDEM_ERROR_INVALID_STATE, "layer_idx", "layer_idx = %d: layer %d of the step has failed, which is to end",
                args_.layer_idx, plan.next_layer);
  if (args_.layer_idx != plan.next_layer)
    return fail(TANDEM_ERROR_INVALID_STATE, "layer_idx", "layer_idx = %d, the step is at layer %d", args_.layer_idx,
                plan.next_layer);
  bool is_same = args_.n_sequences == static_cast<int32_t>(session_.step_.size());
  for (int32_t i = 0; is_same && i < args_.n_sequences; ++i) {
    const Session::StepSequence& step = session_.step_[static_cast<size_t>(i)];
    is_same = args_.sequences[i] == step.id && args_.q_lens[i] == step.q_len;
  }
  if (is_same) return {};
  return fail(TANDEM_ERROR_INVALID_STATE, "sequences", "sequences and q_lens are not those that the step was begun with");
}

// All of a layer at once, also where the step has fewer sequences than a graph was made for: descriptors say so.
Status AttendCall::run_in_plan(bool captures) {
  TANDEM_TRY(check_planned(captures));
  DeviceSession& device = *session_.device_;
  if (captures) device.freeze();
  DeviceSequences sequences;
  sequences.sequences =
      reinterpret_cast<const DeviceSequence*>(device.step_descriptors() + device.step_layer_at(args_.layer_idx));
  sequences.page_tables = reinterpret_cast<const int64_t*>(device.step_descriptors() + device.step_tables_at());
  streaming_sequences_ =
      reinterpret_cast<const DeviceSequence*>(device.step_descriptors() + device.step_streaming_at(args_.layer_idx));
  sequences.n_sequences = static_cast<int32_t>(device.held().step_sequences);
  sequences.max_q_len = static_cast<int32_t>(session_.plan_.max_q_len);
  sequences.max_keys = kAnyKeys;
  TANDEM_TRY(launch(sequences, true, nullptr));
  ++session_.plan_.next_layer;
  return {};
}

}  // namespace tandem
