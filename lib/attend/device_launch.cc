// SPDX-License-Identifier: MIT
#include "lib/attend/device_launch.h"

#include <algorithm>

#include "lib/base/set_if_other.h"

namespace tandem {

namespace {

void clear_task(HandOverTask* task) {
  task->shared = nullptr;
  task->touched_alone.clear();
  set_if_other(task->n_pieces, {});
  set_if_other(task->sent, {});
  task->launches.clear();
  set_if_other<uint8_t*>(task->merged, nullptr);
  set_if_other<int64_t>(task->copied_bytes, 0);
  set_if_other<LayerState*>(task->named_in, nullptr);
  if (task->launch_failed.load(std::memory_order_relaxed)) task->launch_failed = false;
}

}  // namespace

void begin_task(const Call& chunk, HandOverTask* task) {
  const DeviceSession& device = chunk.device();
  task->shape = {chunk.args.layer_idx, static_cast<int32_t>(chunk.calls().size()), 0, 0};
  task->header = reinterpret_cast<const SlotHeader*>(device.shared().slot(task->ticket));
  task->scratch.host.begin(chunk.host_facts(), {device.shared().slot(task->ticket), device.exchange(chunk.facts.idx)});
  clear_task(task);
  set_if_other(task->part, {});
  for (size_t r = 0; r < kMostRoutes; ++r)
    if (task->notes[r] == nullptr && chunk.session.key_routes[r] != nullptr)
      task->notes[r] = chunk.session.key_routes[r]->make_notes();
}

void share_task(const Call& like, HandOverTask& first, const StepCalls* shared) {
  const DeviceSession& device = like.device();
  HandOverTask* const task = like.task;
  std::byte* const slot = device.shared().slot(task->ticket);
  clear_task(task);
  task->shape = first.shape;
  task->shape.layer_idx = like.args.layer_idx;
  task->header = reinterpret_cast<const SlotHeader*>(slot);
  task->shared = shared;
  set_if_other(task->part, first.part);
  HostPart& host = task->scratch.host;
  HostPart::Facts facts = like.host_facts();
  facts.n_ahead = like.args.layer_idx - first.shape.layer_idx;
  host.begin(facts, {slot, device.exchange(like.facts.idx)});
  host.rows().share(&shared->rows);
  host.lay_out(first.scratch.calls);
}

DeviceRows attended_q(const DeviceAppend& append) {
  const Layer& layer = *append.layer;
  if (!rotates_queries(layer)) return append.q;
  return {append.rotated_q, TANDEM_F32, 0, int64_t{layer.n_q_heads} * layer.k_head_dim, layer.k_head_dim};
}

DeviceAppend append_of(const Call& call, const DeviceSequences& sequences) {
  const DeviceSession& device = call.device();
  const AttendArgs& args = call.args;
  const size_t l = call.facts.idx;
  const Layer& layer = device.layer(l, sequences.max_q_len > 1);
  const auto n_tokens = static_cast<int32_t>(args.q.n_tokens);
  return {&layer,
          device.pages(l),
          sequences,
          rows_of(args.q),
          args.k ? rows_of(*args.k) : DeviceRows(),
          args.v ? rows_of(*args.v) : DeviceRows(),
          n_tokens,
          TicketShape{args.layer_idx, 0, n_tokens, sequences.max_q_len}.tag(),
          device.exchange(l),
          device.rope(l),
          rotates_queries(layer) ? device.work().rotated_q() : nullptr,
          call.positions,
          args.x ? rows_of(*args.x) : DeviceRows(),
          0,
          0,
          call.indices};
}

Status begin_routes(const Call& chunk) {
  for (size_t r = kMostRoutes; r-- > 0;)
    if (chunk.task->n_pieces[r] > 0) TANDEM_TRY(chunk.session.key_routes[r]->begin(chunk.route_call()));
  return {};
}

Status launch_append(const Call& call, const DeviceAppend& append) {
  const TraceRange range("append", call.args.layer_idx, "resident");
  return call_device(call.device().device(), &DeviceTable::append, &append, call.args.stream);
}

DeviceAttend window_of(const Call& call, const DeviceAppend& append, bool merges) {
  const DeviceSession& device = call.device();
  const bool is_by_query = call.queries.sequences != nullptr;
  DeviceAttend attend;
  attend.layer = is_by_query ? &device.layer(call.facts.idx, false) : append.layer;
  attend.pages = append.pages;
  attend.sequences = is_by_query ? call.queries : append.sequences;
  attend.q = attended_q(append);
  attend.workspace = device.work().workspace();
  attend.lists = call.lists;
  if (merges)
    point_states({device.work().o(), device.work().lse(), call.layer().n_q_heads}, &attend);
  else
    point_to(output_of(call, 0), &attend);
  return attend;
}

DeviceOutput output_of(const Call& call, int32_t first_head) {
  const AttendArgs& args = call.args;
  const float* sinks = call.device().sinks(call.facts.idx);
  const int64_t first = int64_t{first_head} * call.layer().group_size;
  DeviceOutput to = {rows_of(args.o), nullptr, args.lse_token_stride, args.lse_head_stride, nullptr};
  to.o.data = static_cast<std::byte*>(to.o.data) + first * args.o.head_stride;
  if (args.lse != nullptr) to.lse = args.lse + first * args.lse_head_stride;
  if (sinks != nullptr) to.sinks = sinks + first;
  return to;
}

void point_to(const DeviceOutput& output, DeviceAttend* attend) {
  attend->o = output.o;
  attend->lse = output.lse;
  attend->lse_token_stride = output.lse_token_stride;
  attend->lse_head_stride = output.lse_head_stride;
  attend->sinks = output.sinks;
}

Status attend_window(const Call& call, const DeviceAttend& window) {
  const TraceRange range("attend", call.args.layer_idx, "resident");
  return call_device(call.device().device(), &DeviceTable::attend, &window, call.args.stream);
}

Status attend_pieces(const Call& chunk, const DeviceAttend& window) {
  const DeviceSession& device = chunk.device();
  const RouteCall seen = chunk.route_call();
  DeviceAttend of_pieces = window;
  of_pieces.lists = {};  // a piece has heads that attend all of it
  const auto for_routes = [&](Status (KeyRoute::*visit)(const RouteCall&)) -> Status {
    for (size_t r = 0; r < kMostRoutes; ++r)
      if (seen.task.n_pieces[r] > 0) TANDEM_TRY((chunk.session.key_routes[r].get()->*visit)(seen));
    return {};
  };
  TANDEM_TRY(for_routes(&KeyRoute::open));
  for (const Launch& at : seen.task.launches) {
    KeyRoute& route = *chunk.session.key_routes[at.route];
    DeviceAccumulate sum = route.states_of(seen, at.piece);
    TANDEM_TRY(route.attend(seen, of_pieces, at.piece,
                            {device.work().part_o() + int64_t{sum.first_head} * chunk.layer().v_head_dim,
                             device.work().part_lse() + sum.first_head, chunk.layer().n_q_heads}));
    sum.layer = window.layer;
    sum.o = device.work().o();
    sum.lse = device.work().lse();
    sum.part_o = device.work().part_o();
    sum.part_lse = device.work().part_lse();
    TANDEM_TRY(call_device(device.device(), &DeviceTable::accumulate, &sum, chunk.args.stream));
  }
  return for_routes(&KeyRoute::close);
}

Status merge_and_observe(const Call& call, const DeviceAppend& append, const MergeWork& work) {
  const TraceRange range("merge", call.args.layer_idx, "resident");
  const DeviceSession& device = call.device();
  DeviceMerge merge;
  merge.layer = append.layer;
  merge.sequences = append.sequences;
  merge.n_tokens = append.n_tokens;
  merge.is_observed = call.facts.policy.keeps_maw;
  merge.leaves_finished = work.leaves_finished;
  if (work.waits_for_append) merge.append = &append;
  merge.o = device.work().o();
  merge.lse = device.work().lse();
  const DeviceOutput to = output_of(call, 0);
  merge.o_out = to.o;
  merge.lse_out = to.lse;
  merge.lse_token_stride = to.lse_token_stride;
  merge.lse_head_stride = to.lse_head_stride;
  merge.sinks = to.sinks;
  merge.exchange = append.exchange;
  TANDEM_TRY(call_device(call.device().device(), &DeviceTable::merge, &merge, call.args.stream));
  return call.facts.policy.keeps_maw ? observe(call, append, device.work().lse()) : Status();
}

Status observe(const Call& call, const DeviceAppend& append, const float* lse) {
  const TraceRange range("observe", call.args.layer_idx, "resident");
  DeviceObserve observe;
  observe.layer = append.layer;
  observe.pages = append.pages;
  observe.sequences = append.sequences;
  observe.q = attended_q(append);
  observe.lse = lse;
  observe.n_tokens = append.n_tokens;
  observe.has_appended = append.k.data != nullptr;
  observe.alpha = call.session.options.alpha;
  observe.n_counted = static_cast<int32_t>(counted_queries(observe.alpha));
  observe.exchange = append.exchange;
  if (call.args.speculative) {  // counted later, if kept: only the lse are handed over
    observe.sequences.n_sequences = 0;
    observe.sequences.max_keys = 0;
    observe.has_appended = 0;
  }
  return call_device(call.device().device(), &DeviceTable::observe, &observe, call.args.stream);
}

}  // namespace tandem
