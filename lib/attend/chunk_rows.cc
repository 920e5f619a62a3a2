// SPDX-License-Identifier: MIT
#include "lib/attend/chunk_rows.h"

#include <algorithm>
#include <iterator>

#include "lib/attend/device_launch.h"
#include "lib/call/ticket_rows.h"

namespace tandem {
namespace {

constexpr int64_t kTicket = kMostTicketTokens;

std::byte* buffer_of(const Call& chunk) {
  const PrefillSize& size = chunk.taken.prefill;
  return chunk.device().work().prefill_area() + size.rows_at + chunk.device().side()->turn() * size.rows_bytes;
}

// Lists the copies from the current buffer to the store. A copy has rows of one pinned piece. Returns the number of bytes.
int64_t list_copies(const Call& chunk, const SequenceCall& of, CopyList* copies) {
  const NewRowsLayout layout(chunk.layer(), of.q_len);
  std::byte* const buffer = buffer_of(chunk);
  copies->clear();
  copies->cut();
  RowCursor rows(chunk.cache().view(*of.sequence), chunk.args.layer_idx, {0, chunk.layer().n_kv_heads},
                 {of.first_query, of.length}, kAllPlanes, RowOrder::kByRun);
  int64_t bytes = 0;
  for (RowRun run; rows.next(&run); bytes += run.bytes) {
    const int64_t row_bytes = run.bytes / run.n;
    const int64_t first = run.plane == kPlaneHidden ? layout.x_at : layout.at[run.plane] + run.head * of.q_len * row_bytes;
    copies->add(run, buffer + first + (run.token - of.first_query) * row_bytes);
  }
  return bytes;
}

}  // namespace

void ChunkRows::choose_way(Call& call) {
  if (core_.refuses_row_copies) return;
  bool is_pinned = true;
  for (const SequenceCall& of : call.calls())
    is_pinned = call.cache().pin(*of.sequence, call.args.layer_idx, {of.first_query, of.length}) && is_pinned;
  call.taken.prefill.copies_rows = is_pinned;
  if (is_pinned) return;
  core_.refuses_row_copies = true;
  call.cache().engine().log(TANDEM_LOG_WARNING,
                            "the device refuses to pin the host store: rows of long appends go there %lld tokens at a time",
                            static_cast<long long>(kTicket));
}

// If pieces are streamed, a ticket before the copies tells when the queries have arrived. The time of the pieces counts from
// then (HandOverPart::begins_long).
int64_t ChunkRows::n_tasks(const PrefillSize& size, int64_t n_tokens) {
  if (!size.copies_rows) return tickets_of(n_tokens);
  return size.streams() ? 2 : 1;
}

void ChunkRows::prepare(Call& chunk) {
  const SequenceCall& of = chunk.calls()[0];
  const bool copies = chunk.taken.prefill.copies_rows;
  const int64_t n = n_tasks(chunk.taken.prefill, of.q_len);
  for (int64_t i = 0; i < n; ++i) {
    HandOverTask& taking = core_.hand_over().next_task(i);
    SequenceCall rows = of;
    rows.first_query = of.first_query + (copies ? 0 : i * kTicket);
    rows.q_len = copies ? 0 : std::min(kTicket, of.length - rows.first_query);
    rows.length = rows.first_query + rows.q_len;
    taking.step = 0;
    begin_task(chunk, &taking);
    taking.part.is_rows = true;
    taking.part.begins_long = i == 0;
    taking.shape.n_tokens = taking.shape.max_q_len = static_cast<int32_t>(rows.q_len);
    if (!copies) taking.scratch.host.rows().add(chunk.cache().view(*rows.sequence), rows);
    if (copies) taking.shape.n_sequences = 0;
    taking.touched_alone.push_back({of.sequence->id, rows.first_query, of.foreign_begin});
  }
  if (copies) chunk.task->copied_bytes = list_copies(chunk, of, &copies_);
}

int64_t ChunkRows::describe_tickets(const Call& chunk, const DeviceSequence& of_chunk, DeviceSequence* tickets) {
  if (chunk.taken.prefill.copies_rows) return 0;
  const int64_t n = tickets_of(of_chunk.q_len), first_query = of_chunk.end - of_chunk.q_len;
  for (int64_t i = 0; i < n; ++i) {
    DeviceSequence& rows = *tickets++ = of_chunk;
    rows.end = std::min(of_chunk.end, first_query + (i + 1) * kTicket);
    rows.q_len = static_cast<int32_t>(rows.end - first_query - i * kTicket);
    rows.position += i * kTicket;
  }
  return n;
}

// The last chunk's buffers may overlap other parts of this chunk's area. If the buffers have moved, their copies must end
// first.
Status ChunkRows::send(const Call& chunk, const DeviceAppend& append, const DeviceSequence* tickets) {
  const TraceRange range("append", chunk.args.layer_idx, "resident");
  const PrefillSize& size = chunk.taken.prefill;
  if (buffers_at_ != size.rows_at || buffer_bytes_ != size.rows_bytes)
    TANDEM_TRY(join_side(chunk.device(), chunk.args.stream));
  buffers_at_ = size.rows_at;
  buffer_bytes_ = size.rows_bytes;
  return size.copies_rows ? copy(chunk, append) : send_by_tickets(chunk, append, tickets);
}

Status ChunkRows::copy(const Call& chunk, const DeviceAppend& append) {
  DeviceSession& device = chunk.device();
  SideStream& side = *device.side();
  const PrefillSize& size = chunk.taken.prefill;
  TANDEM_TRY(side.begin_turn(chunk.args.stream));
  const NewRowsLayout layout(chunk.layer(), append.n_tokens);
  DeviceAppend rows = append;
  rows.exchange = {};
  rows.exchange.slots = buffer_of(chunk);
  rows.exchange.n_rows = append.n_tokens;
  std::copy(std::begin(layout.at), std::end(layout.at), rows.exchange.rows_at);
  rows.exchange.x_at = layout.x_at;
  TANDEM_TRY(call_device(device.device(), &DeviceTable::append, &rows, chunk.args.stream));
  TANDEM_TRY(side.fork(chunk.args.stream));
  if (size.streams()) TANDEM_TRY(post_empty(chunk, append));
  const std::vector<StridedCopy>& copies = copies_.copies();
  TANDEM_TRY(call_device(device.device(), &DeviceTable::copy_batch, copies.data(), std::ssize(copies), side.get()));
  TANDEM_TRY(side.end_turn());
  return post_empty(chunk, append);
}

// Takes a ticket after all work launched on the side stream so far.
Status ChunkRows::post_empty(const Call& chunk, const DeviceAppend& append) const {
  const DeviceSession& device = chunk.device();
  DeviceAppend empty;
  empty.layer = append.layer;
  empty.tag = TicketShape{chunk.args.layer_idx, 0, 0, 0}.tag();
  empty.exchange = device.exchange(chunk.facts.idx);
  TANDEM_TRY(call_device(device.device(), &DeviceTable::append, &empty, device.side()->get()));
  core_.hand_over().post();
  return {};
}

Status ChunkRows::send_by_tickets(const Call& chunk, const DeviceAppend& append, const DeviceSequence* tickets) const {
  DeviceSession& device = chunk.device();
  const AttendArgs& args = chunk.args;
  TANDEM_TRY(device.side()->fork(args.stream));
  for (int64_t i = 0; i < tickets_of(append.n_tokens); ++i) {
    const int64_t first = i * kTicket, n = std::min(kTicket, append.n_tokens - first);
    DeviceAppend rows = append;
    rows.sequences.sequences = tickets + i;
    rows.sequences.max_q_len = rows.n_tokens = static_cast<int32_t>(n);
    rows.k = rows_of(from_row(*args.k, first, n));
    if (args.v != nullptr) rows.v = rows_of(from_row(*args.v, first, n));
    if (args.x != nullptr) rows.x = rows_of(from_row(*args.x, first, n));
    if (append.q.data != nullptr) {
      rows.q = rows_of(from_row(args.q, first, n));
      rows.rotated_q += first * append.layer->n_q_heads * append.layer->k_head_dim;
    }
    rows.tag = TicketShape{args.layer_idx, 0, rows.n_tokens, rows.n_tokens}.tag();
    rows.exchange = device.exchange(chunk.facts.idx);
    rows.leaves_room = chunk.taken.prefill.rows_have_time ? 2 : 1;
    TANDEM_TRY(call_device(device.device(), &DeviceTable::append, &rows, device.side()->get()));
    core_.hand_over().post();
  }
  return {};
}

}  // namespace tandem
