// SPDX-License-Identifier: MIT
#include "lib/attend/device_lane.h"

#include <algorithm>
#include <chrono>
#include <mutex>

#include "lib/attend/call_keys.h"
#include "lib/attend/descriptors.h"
#include "lib/attend/device_chunk.h"
#include "lib/attend/device_launch.h"
#include "lib/attend/guess.h"
#include "lib/attend/named_call.h"
#include "lib/attend/pattern_call.h"
#include "lib/attend/search_call.h"
#include "lib/attend/session_states.h"
#include "lib/attend/split.h"
#include "lib/attend/window_fill.h"

namespace tandem {
namespace {

Status check_rows(const TensorView* view, const char* name) {
  if (view == nullptr || is_tensor_float(view->dtype)) return {};
  const std::string field = std::string(name) + ".dtype";
  return fail(TANDEM_ERROR_UNSUPPORTED, field.c_str(), "%s = %d (%s): in device memory f32, f16 and bf16 are appended",
              field.c_str(), view->dtype, find_dtype(view->dtype)->name);
}

// Checks a call of a layer in the open planned step.
Status check_planned(const Call& call, bool captures) {
  const OpenStep& step = call.session.step;
  const AttendArgs& args = call.args;
  if (args.partial)
    return fail(TANDEM_ERROR_INVALID_STATE, "flags", "flags = TANDEM_ATTEND_PARTIAL in a step that was planned as a whole");
  if (!captures && args.stream != step.stream)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream", "stream = %p, the step was begun on %p", args.stream, step.stream);
  if (!call.appends()) return fail(TANDEM_ERROR_INVALID_STATE, "k", "k = NULL in a step that was planned with new tokens");
  if (step.has_failed())
    return fail(TANDEM_ERROR_INVALID_STATE, "layer_idx", "layer_idx = %d: layer %d of the step has failed, which is to end",
                args.layer_idx, step.next_layer);
  if (args.layer_idx != step.next_layer)
    return fail(TANDEM_ERROR_INVALID_STATE, "layer_idx", "layer_idx = %d, the step is at layer %d", args.layer_idx,
                step.next_layer);
  bool is_same = args.n_sequences == static_cast<int32_t>(step.sequences.size());
  for (int32_t i = 0; is_same && i < args.n_sequences; ++i) {
    const OpenStep::Sequence& of = step.sequences[static_cast<size_t>(i)];
    is_same = args.sequences[i] == of.id && args.q_lens[i] == of.q_len;
  }
  if (is_same) return {};
  return fail(TANDEM_ERROR_INVALID_STATE, "sequences", "sequences and q_lens are not those that the step was begun with");
}

// Returns a number that is unique for each layer of each planned step of the session.
int64_t epoch_of(const Call& call) {
  const auto n_layers = static_cast<int64_t>(call.session.layers.size());
  return static_cast<int64_t>(call.session.step.n_planned) * n_layers + call.args.layer_idx + 1;
}

// Returns the call's shape without the values that depend on windows.
CallShape make_shape(const Call& call) {
  AttendScratch& scratch = call.scratch;
  scratch.shapes.assign(scratch.calls.size(), {});
  for (size_t i = 0; i < scratch.calls.size(); ++i) {
    scratch.shapes[i].q_len = scratch.calls[i].q_len;
    scratch.shapes[i].length = scratch.calls[i].length;
    scratch.shapes[i].has_gaps = !scratch.calls[i].sequence->positions.empty();
  }
  CallShape shape{&call.layer(), call.facts.idx, scratch.shapes};
  shape.appends = call.appends();
  shape.is_speculative = call.args.speculative;
  shape.is_partial = call.args.partial;
  // Memory that graphs hold cannot grow any more. Steps larger than that are refused.
  shape.has_room_to_step = !call.device().is_frozen();
  return shape;
}

// Returns the index of the first of the last sequences of one kind: single queries, or appends. Kernels for several queries
// would treat single queries as several. So a call with its single queries together is cut into chunks of one kind.
size_t first_of_last_kind(const std::vector<SequenceCall>& calls) {
  size_t first = calls.size() - 1;
  while (first > 0 && calls[first - 1].is_append == calls[first].is_append) --first;
  return first;
}

}  // namespace

Status DeviceLane::start(Call& call, bool* was_launched) {
  SessionCore& session = call.session;
  if (session.device != nullptr && !session.step.is_planned) TANDEM_TRY(session.hand_over().take_bad_index());
  Status fault = session.device != nullptr ? session.hand_over().fault() : Status();
  if (!fault.ok()) {
    if (session.step.is_planned) return fault;
    std::unique_lock lock(call.cache().mutex());
    return session.states->meet_fault(call.args.stream);
  }
  bool captures = false;
  TANDEM_TRY(is_capturing(*call.cache().engine().device(), call.args.stream, &captures));
  if (captures && !session.step.is_planned)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream",
                "stream = %p is being captured, and no step is open that was begun on a stream", call.args.stream);
  TANDEM_TRY(check_search(call));
  TANDEM_TRY(check_named_layer(call));
  if (call.args.speculative) TANDEM_TRY(check_guess(call));
  TANDEM_TRY(check_rows(call.args.k, "k"));
  TANDEM_TRY(check_rows(call.args.v, "v"));
  *was_launched = session.step.is_planned;
  return *was_launched ? launch_planned(call, captures) : Status();
}

// Counts the appends on the host that wait to be counted. No work of the layer is in flight then.
Status DeviceLane::take_state(const Call& call, SequenceState& state, SequenceCall* of) const {
  of->state = &state.layers[call.facts.idx];
  of->window = &state.window;
  if (!call.facts.policy.keeps_maw || of->window->has_maw(call.facts.idx)) return {};
  return of->state->selection->catch_up(*of->sequence, of->state->window_begin);
}

Status DeviceLane::reserve_sequences(Call& call, CallShape* shape) {
  AttendScratch& scratch = call.scratch;
  for (size_t i = 0; i < scratch.calls.size(); ++i) {
    SequenceCall& of = scratch.calls[i];
    SequenceShape& sized = scratch.shapes[i];
    Sequence& sequence = *of.sequence;
    TANDEM_TRY(check_resident(call.session, call.facts, of.length, call.appends() || !of.is_append));
    if (call.appends()) TANDEM_TRY(call.cache().ensure(sequence, std::max(sequence.longest(), of.length), "q_lens"));
    if (call.args.parent_idx == nullptr)
      sequence.extend_positions(of.length);
    else
      sequence.parents.reserve(static_cast<size_t>(of.q_len));
    SequenceState* state = nullptr;
    TANDEM_TRY(call.session.states->reserve_window(sequence, shape->most_queries, of.length, &state));
    sized.window_pages = state->window.n_pages();
    TANDEM_TRY(take_state(call, *state, &of));
    sized.window_begin = of.state->window_begin;
    const int64_t sliding_window = call.layer().sliding_window;
    if (sliding_window > 0) sized.first_seen = sequence.first_within(sequence.position(of.first_query), sliding_window);
  }
  return {};
}

Status DeviceLane::reserve(Call& call) {
  TANDEM_TRY(take_named(call));
  std::unique_lock lock(call.cache().mutex());
  DeviceSession& device = call.device();
  CallShape shape = make_shape(call);
  TANDEM_TRY(device.most_queries(call.facts.idx, call.session.terms().wanted_queries(shape), &shape.most_queries));
  // If queries are described one by one or a few at a time, a chunk may have more queries of a sequence than kernels take.
  const bool has_parts = call.args.speculative || call.facts.policy.names_keys();
  call.most_queries = has_parts ? kMostTicketTokens : shape.most_queries;
  size_named(call, &shape);
  call.most_tokens = shape.most_tokens;
  TANDEM_TRY(reserve_sequences(call, &shape));
  return hold(call, shape);
}

// Holds the call's memory. Long appends take as much as there is; without memory for the routes, the CPU attends.
Status DeviceLane::hold(Call& call, const CallShape& shape) {
  DeviceSession& device = call.device();
  const auto hold_all = [&] { return device.hold(reserve_call(call.session.terms(), shape, call.taken), call.args.stream); };
  TANDEM_TRY(take_routes(call, shape));
  Status status;
  do {
    TANDEM_TRY(long_append_.size_and_pin(call, shape));
    status = hold_all();
  } while (!status.ok() && long_append_.retry_smaller(call, status));
  if (status.ok() || !call.taken.any()) return status;
  TANDEM_TRY(give_streams_up(call, std::move(status)));
  return hold_all();
}

namespace {

// Returns n, or fewer queries of the n_left, so that no query block of a policy that names keys is cut.
int64_t whole_blocks(const Call& call, int64_t n, int64_t n_left) {
  if (!call.facts.policy.names_keys() || n == n_left) return n;
  const int64_t block = follows_patterns(call) ? kPatternBlock : kMostQueryBlock;
  return n / block * block;
}

// Returns the end of the sequences of a chunk that begins with sequence `begin`. A policy that names keys names them
// differently for single queries and for appends, so such a chunk has one kind.
size_t end_of_chunk(const Call& call, size_t begin) {
  const std::vector<SequenceCall>& all = call.calls();
  const size_t last_kind = first_of_last_kind(all);
  if (!call.facts.policy.names_keys()) return begin < last_kind ? last_kind : all.size();
  size_t end = begin;
  while (end < all.size() && all[end].is_append == all[begin].is_append) ++end;
  return end;
}

}  // namespace

// Takes the next rows of the caller's tensors: at most a ticket's, and at most most_queries of a sequence.
Status DeviceLane::next_chunk(Call& call, ChunkPlace* place, Chunk* chunk) {
  if (const int64_t n = long_append_.chunk_len(call, *place); n > 0) return long_append_.next_chunk(call, n, place, chunk);
  HandOver& hand_over = call.session.hand_over();
  HandOverTask& task = hand_over.next_task();
  // The place may be free because its last task is lost. The device may still read that task's upload then.
  TANDEM_TRY(hand_over.fault());
  task.step = 0;
  const std::vector<SequenceCall>& all = call.calls();
  std::vector<SequenceCall>& calls = task.scratch.calls;
  calls.clear();
  const int64_t first_row = all[place->call].first_row + place->query;
  const size_t end = end_of_chunk(call, place->call);
  int64_t n_rows = 0;
  while (place->call < end && n_rows < call.most_tokens) {
    const SequenceCall& whole = all[place->call];
    const int64_t first_query = whole.first_query + place->query;
    const int64_t n_left = std::min({whole.q_len - place->query, call.most_queries, call.most_tokens - n_rows});
    // Kernels get the position of the first query only, so positions must be consecutive.
    const int64_t n_near =
        call.layer().rope != nullptr ? consecutive(whole.sequence->positions, first_query, n_left) : n_left;
    // A gap in the positions also ends a query block.
    const int64_t n = n_near < n_left ? n_near : whole_blocks(call, n_left, whole.q_len - place->query);
    if (n == 0) break;  // the next chunk begins with the block
    // Head patterns choose keys for all queries of a sequence in a chunk. So a sequence that fits a chunk of its own is not
    // cut.
    if (follows_patterns(call) && !calls.empty() && place->query == 0 && n < whole.q_len) break;
    SequenceCall& part = calls.emplace_back(whole);
    part.q_len = n;
    part.first_row = n_rows;
    part.first_query = first_query;
    part.length = part.first_query + n;
    n_rows += n;
    place->query += n;
    if (place->query < whole.q_len) break;
    ++place->call;
    place->query = 0;
  }
  chunk->args.emplace(call.args, first_row, n_rows);
  chunk->own.emplace(call.session, chunk->args->args, task.scratch, &task);
  chunk->call = &*chunk->own;
  chunk->work = this;
  if (call.args.named != nullptr) {
    chunk->call->indices = indices_of(call.scratch.named, first_row);
    chunk->call->has_host_idx = !call.scratch.named.on_device;
    chunk->call->first_row = first_row;
  }
  // An earlier chunk may have found that memory cannot be pinned.
  if (!call.session.refuses_streams) chunk->call->taken = call.taken;
  chunk->call->taken.prefill = {};
  return {};
}

Status DeviceLane::prepare(Call& chunk) {
  HandOverTask* const task = chunk.task;
  const AttendArgs& args = chunk.args;
  clear_visibility(chunk.scratch);
  begin_task(chunk, task);
  for (SequenceCall& of : chunk.calls()) {
    task->shape.n_tokens += static_cast<int32_t>(of.q_len);
    task->shape.max_q_len = std::max(task->shape.max_q_len, static_cast<int32_t>(of.q_len));
    evict_before(chunk, &of);
    if (chunk.facts.policy.keeps_maw && !chunk.appends()) fade_newer(chunk, of);
    (void)see_keys(chunk, of);  // fails only if a call is cancelled; a call on a device cannot be
    of.cpu_begin = of.host_begin;
    of.gives_queries = chunk.facts.policy.keeps_maw && of.is_append;
    if (args.speculative) leave_guess_to_host(&of);
  }
  if (args.named == nullptr) choose_routes(chunk);
  point_visibility(chunk.scratch);
  chunk.scratch.host.lay_out(chunk.scratch.calls);
  if (chunk.may_name() && has_cpu_part(chunk.calls()))
    for (size_t i = 0; i < chunk.calls().size(); ++i) chunk.scratch.host.keep_copy(i, true);
  for (const SequenceCall& of : chunk.calls()) {
    if (chunk.appends()) chunk.scratch.host.rows().add(chunk.cache().view(*of.sequence), of);
    task->touched_alone.push_back({of.sequence->id, chunk.appends() ? of.first_query : of.length, of.foreign_begin});
  }
  if (chunk.scratch.host.selects()) prepare_selection(chunk);
  return {};
}

Status DeviceLane::fill(Call& chunk) {
  for (const SequenceCall& of : chunk.calls()) TANDEM_TRY(fill_window(chunk, of, INT64_MAX));
  wait_for_sent_rows(chunk);
  return {};
}

Status DeviceLane::launch(Call& chunk) {
  HandOverTask& task = *chunk.task;
  DeviceSequences sequences;
  TANDEM_TRY(upload_descriptors(chunk, &sequences));
  TANDEM_TRY(send_indices(chunk));
  const bool merges = chunk.facts.policy.keeps_maw || std::any_of(chunk.calls().begin(), chunk.calls().end(),
                                                                  [](const SequenceCall& of) { return of.has_host; });
  bool is_launched = false;
  const AtEnd undo([&] {
    if (is_launched) return;
    for (size_t r = 0; r < kMostRoutes; ++r)
      if (task.n_pieces[r] > 0) chunk.session.key_routes[r]->wait_after_failure(chunk.route_call());
    task.launch_failed = true;
  });
  TANDEM_TRY(join_side(chunk.device(), chunk.args.stream));
  task.asked = std::chrono::steady_clock::now();
  TANDEM_TRY(begin_routes(chunk));
  const DeviceAppend append = append_of(chunk, sequences);
  TANDEM_TRY(launch_append(chunk, append));
  chunk.session.hand_over().post();
  TANDEM_TRY(name_keys(chunk, sequences));
  TANDEM_TRY(search_keys(chunk, sequences, attended_q(append), append));
  const DeviceAttend window = window_of(chunk, append, merges);
  TANDEM_TRY(follows_patterns(chunk) ? attend_patterns(chunk, window) : attend_window(chunk, window));
  if (merges) {
    TANDEM_TRY(attend_pieces(chunk, window));
    TANDEM_TRY(merge_and_observe(chunk, append, {}));
    if (task.merged != nullptr) TANDEM_TRY(chunk.device().mark_merged(task.idx, chunk.args.stream));
  }
  is_launched = true;
  return {};
}

// Launches a layer of the step, which has posted the tasks of all layers. The launch always has the full number of
// sequences, even if the step has fewer than a graph was made for; descriptors say so. Attention may run beside the append.
// It may not in eager calls: no merge follows if the window has all keys, and the next call's append would wait until this
// call's rows have crossed the bus.
Status DeviceLane::launch_planned(Call& call, bool captures) {
  TANDEM_TRY(check_planned(call, captures));
  TANDEM_TRY(check_named_in_step(call));
  if (call.args.named != nullptr) call.indices = indices_of(*call.args.named, 0);
  DeviceSession& device = call.device();
  if (captures) device.freeze();
  const size_t l = call.facts.idx;
  const DeviceSequences sequences = step_sequences(call);
  call.lists = lists_at(call, device.work().step_descriptors() + device.steps().lists_at(l), sequences.n_sequences);
  DeviceAppend append = append_of(call, sequences);
  const bool searches = call.facts.policy.prunes;
  if (call.indices.data == nullptr) append.epoch = epoch_of(call);  // else a kernel in between waits for the whole append
  TANDEM_TRY(launch_append(call, append));
  call.session.step.n_appended = call.args.layer_idx + 1;
  TANDEM_TRY(name_keys(call, sequences));
  TANDEM_TRY(search_keys(call, sequences, attended_q(append), append));
  DeviceAttend window = window_of(call, append, true);
  if (append.epoch != 0 && !searches) window.append = &append;
  const bool finishes = !call.facts.policy.keeps_maw && call.queries.sequences == nullptr;
  if (finishes) window.finished = output_of(call, 0);
  TANDEM_TRY(attend_window(call, window));
  TANDEM_TRY(merge_and_observe(call, append, {finishes, searches}));
  ++call.session.step.next_layer;
  return {};
}

Status DeviceLane::commit(Call& chunk) {
  TANDEM_TRY(chunk.session.hand_over().fault());  // a lost chunk is not committed
  commit_sequences(chunk);
  return {};
}

// Work in flight may still write to the state, so the ring is drained first.
Status DeviceLane::take_back(Call& call, Status why) {
  HandOver& hand_over = call.session.hand_over();
  std::unique_lock lock(call.cache().mutex());
  if (call.appends()) {
    hand_over.drain();
    for (const SequenceCall& of : call.calls())
      call.cache().cut_layer(*call.session.states, *of.sequence, call.facts.idx, of.first_query);
  }
  // A fault that this call reports is not reported again.
  if (!hand_over.can_start_over() || why.code() != hand_over.fault().code()) return why;
  return call.session.states->meet_fault(call.args.stream);
}

}  // namespace tandem
