// SPDX-License-Identifier: MIT
// The route "stream" (HeadInfer): keys outside the window cross the bus in pieces and are attended on the device.
//
//   choose     what is streamed, cut into pieces (lib/routes/choose.cc, lib/routes/stream_pieces.h)
//   send       a piece: copies on a stream of the session's own, into the buffer that is free next
//   attend     the piece as if it were a window; its states into those of the window, which come first, in the order of the
//              pieces: the sum does not depend on what is there first
//
// The host part lies before the queries, but for queries whose tokens were there already: causal order is the kernels' to
// keep, as for the window (DeviceSequence::n_after). Sinks are merged once, last, as ever.
//
// While anything is on its way the task is not finished, so nobody changes the pages (lib/hand_over.h). A call waits for the
// device only where the store does not have the keys yet that an earlier call has appended and this one has to stream.
#include <algorithm>
#include <chrono>

#include "lib/attend_call.h"
#include "lib/device_status.h"
#include "lib/placement.h"

namespace tandem {

void AttendCall::wait_for_streamed_rows() {
  for (const SequenceCall& call : scratch_.calls)
    if (call.streams()) session_.device_->hand_over().wait_for_rows(call.sequence->id, args_.layer_idx, call.cpu_begin);
  for (const SequenceCall& call : scratch_.calls)
    if (taken_.prefill.n_tokens > 0 && call.streaming_heads.keys.sink_end > 0)
      session_.device_->hand_over().wait_for_rows(call.sequence->id, args_.layer_idx, call.streaming_heads.keys.sink_end);
}

// Behind the descriptors of the calls: one for each piece, and the page table that serves all of them.
void AttendCall::describe_pieces(const HandOverTask& task, DeviceSequence* to, int64_t* table) const {
  const StreamLayout& layout = task.layout;
  for (const StreamPiece& piece : task.pieces) {
    const SequenceCall& call = scratch_.calls[piece.call];
    *to = {};
    to->begin = piece.begin;
    to->end = piece.end;
    to->q_len = static_cast<int32_t>(call.q_len);
    to->first_row = static_cast<int32_t>(call.first_row);
    to->table_len = static_cast<int32_t>(layout.n_pages);
    to->evict_end = piece.begin;
    to->n_after = call.length - piece.end;
    ++to;
  }
  for (int64_t i = 0; i < layout.n_pages; ++i) table[i] = i * layout.page_bytes;
}

// The store may grow meanwhile: it is asked for nothing but what the task has of it.
Status AttendCall::send_piece(const HandOverTask& task, const StreamPiece& piece) {
  const TraceRange range("load k v", args_.layer_idx, "stream");
  const StreamLayout& layout = task.layout;
  StreamBuffers& buffers = *session_.device_->stream();
  CopyList copies;
  std::byte* const buffer = buffers.next();
  const Sequence& sequence = *scratch_.calls[piece.call].sequence;
  RowCursor rows(cache_.store().view(sequence.pages, {}, task.bases), args_.layer_idx, {piece.first_head, piece.n_heads},
                 {piece.begin, piece.end}, kHeadPlanes, RowOrder::kByRun);
  rows.stop_at_multiples(layout.page_len);
  for (RowRun run; rows.next(&run);) {
    std::byte* const page = buffer + run.token / layout.page_len % layout.n_pages * layout.page_bytes;
    copies.add(layout.row(page, run.plane, run.head - piece.first_head, run.token % layout.page_len), run);
  }
  return buffers.send(copies.copies());
}

// The first pieces are under way before anything else of the call.
Status AttendCall::begin_stream(HandOverTask* task) {
  if (task->pieces.empty()) return {};
  const size_t n = std::min(task->pieces.size(), static_cast<size_t>(StreamBuffers::kBuffers));
  for (size_t i = 0; i < n; ++i) TANDEM_TRY(send_piece(*task, task->pieces[i]));
  return mark_stream(*task, n);
}

Status AttendCall::mark_stream(const HandOverTask& task, size_t n_sent) {
  if (n_sent < task.pieces.size()) return {};
  return session_.device_->stream()->mark(session_.device_->streamed_on_device(task.idx));
}

void point_states(const HeadStates& to, DeviceAttend* call) {
  const int64_t dim = call->layer->v_head_dim;
  call->o = {to.o, TANDEM_F32, 0, to.n_heads * dim, dim};
  call->lse = to.lse;
  call->lse_token_stride = to.n_heads;
  call->lse_head_stride = 1;
}

DeviceAttend of_heads(const DeviceAttend& call, int32_t first_head, int32_t n_heads, Layer* layer) {
  *layer = *call.layer;
  layer->n_kv_heads = n_heads;
  layer->n_q_heads = n_heads * layer->group_size;
  layer->sinks = nullptr;
  DeviceAttend part = call;
  part.layer = layer;
  part.q.data = static_cast<std::byte*>(call.q.data) +
                int64_t{first_head} * layer->group_size * row_bytes(call.q.dtype, 1) * call.q.head_stride;
  for (int32_t p = 0; p < kPlanes; ++p)
    if (call.pages.planes[p] != nullptr) part.pages.planes[p] += first_head * call.pages.head_stride[p];
  return part;
}

// call: as that of the window; its states go to the session's for parts, those of the piece's heads to `to`.
Status AttendCall::attend_piece(const DeviceAttend& window, const HandOverTask& task, const StreamPiece& piece,
                                const std::byte* buffer, const DeviceSequence* described, const HeadStates& to) {
  const StreamLayout& layout = task.layout;
  Layer layer;
  DeviceAttend attend = of_heads(window, piece.first_head, piece.n_heads, &layer);
  attend.pages = layout.pages(const_cast<std::byte*>(buffer), layout.page_len);
  attend.sequences.sequences = described;
  attend.sequences.n_sequences = 1;
  attend.sequences.max_keys = piece.end - piece.begin;
  point_states(to, &attend);
  return call_device(session_.device_->device(), &DeviceTable::attend, &attend, args_.stream);
}

// window: the call that has left its states in the session's o() and lse(). idx: of the task's pieces.
Status AttendCall::attend_streamed(const DeviceAttend& window, const HandOverTask& task, size_t idx) {
  DeviceSession& device = *session_.device_;
  StreamBuffers& buffers = *device.stream();
  const StreamPiece& piece = task.pieces[idx];
  const SequenceCall& call = scratch_.calls[piece.call];
  const int64_t first_head = int64_t{piece.first_head} * layer_.group_size;
  DeviceAttend attend = window;
  const auto* described = reinterpret_cast<const DeviceSequence*>(device.descriptors() + task.pieces_at);
  attend.sequences.page_tables = reinterpret_cast<const int64_t*>(described + task.pieces.size());
  std::byte* buffer = nullptr;
  TANDEM_TRY(buffers.take(args_.stream, &buffer));
  TANDEM_TRY(
      attend_piece(attend, task, piece, buffer, described + idx,
                   {device.part_o() + first_head * layer_.v_head_dim, device.part_lse() + first_head, layer_.n_q_heads}));
  TANDEM_TRY(buffers.done_with(args_.stream));
  size_t next = idx + static_cast<size_t>(StreamBuffers::kBuffers);
  if (next < task.pieces.size()) TANDEM_TRY(send_next(task, &next));
  DeviceAccumulate sum;
  sum.layer = window.layer;
  sum.first_row = static_cast<int32_t>(call.first_row);
  sum.n_rows = static_cast<int32_t>(call.q_len);
  sum.first_head = piece.first_head * layer_.group_size;
  sum.n_heads = piece.n_heads * layer_.group_size;
  return add_part(sum);
}

// sum: which rows and heads of the session's states for parts go to those of the window.
Status AttendCall::add_part(DeviceAccumulate sum) {
  const DeviceSession& device = *session_.device_;
  sum.o = device.o();
  sum.lse = device.lse();
  sum.part_o = device.part_o();
  sum.part_lse = device.part_lse();
  return call_device(device.device(), &DeviceTable::accumulate, &sum, args_.stream);
}

Status AttendCall::send_next(const HandOverTask& task, size_t* n_sent) {
  if (*n_sent == task.pieces.size()) return {};
  TANDEM_TRY(send_piece(task, task.pieces[(*n_sent)++]));
  return mark_stream(task, *n_sent);
}

}  // namespace tandem
