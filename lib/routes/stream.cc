// SPDX-License-Identifier: MIT
#include "lib/routes/stream.h"

#include <algorithm>
#include <atomic>

#include "lib/base/trace.h"
#include "lib/device/device_session.h"
#include "lib/machine/device_status.h"
#include "lib/routes/routes_taken.h"
#include "lib/store/cache.h"

namespace tandem {

struct StreamRoute::Notes final : RouteNotes {
  StreamLayout layout;
  std::vector<StreamPiece> pieces;
  std::vector<TokenRange> ranges;  // of pieces that are sent in part
  size_t n_sent = 0;
  const DeviceSequence* described = nullptr;  // device address of each piece's descriptor
  const int64_t* page_table = nullptr;        // shared by all pieces
};

Status StreamRoute::make(const RouteSetup& setup, size_t idx, std::unique_ptr<KeyRoute>* route) {
  if (setup.options.is_host()) return {};
  std::vector<StreamLayout> layouts;
  TANDEM_TRY(make_stream_layouts(setup.layers, setup.policies, setup.extent_len, setup.options, &layouts));
  if (!layouts.empty()) route->reset(new StreamRoute(idx, std::move(layouts), setup.options.buffer_bytes));
  return {};
}

Status StreamRoute::hold(const RouteHold& call) {
  if (buffers_ != nullptr) return {};
  return StreamBuffers::create(call.device.device(), call.cache.device_tier(), buffer_bytes_, StreamBuffers::kBuffers,
                               &buffers_);
}

// Returns false, as other routes send some of their keys by this one and cannot go on without it.
bool StreamRoute::give_up(Cache& cache, const Status& why) {
  cache.engine().log(TANDEM_LOG_WARNING,
                     "the CPU attends all keys outside the window, as there is no memory to stream them: %s",
                     why.info().message.c_str());
  return false;
}

RouteBytes StreamRoute::bytes(const SizeTerms& terms, const std::vector<Layer>&) const {
  return {StreamBuffers::kBuffers * terms.routes.buffer_bytes, 0};
}

void StreamRoute::reserve(const SizeTerms& terms, const CallShape& shape, const RoutesTaken& taken,
                          Reservation* needs) const {
  const HeadRuns runs = HeadRuns::retrieval(terms.kinds(shape.layer_idx), *shape.layer);
  int64_t n_pieces = 0;
  for (const SequenceShape& sequence : shape.sequences) {
    const TokenRange tokens = terms.streamed(shape, sequence);
    n_pieces += count_pieces(taken.layout, runs.get(), tokens.begin, tokens.end);
  }
  needs->add_descriptors(n_pieces, taken.layout.n_pages);
  needs->has_part_states = 1;
}

std::unique_ptr<RouteNotes> StreamRoute::make_notes() const { return std::make_unique<Notes>(); }

StreamRoute::Notes& StreamRoute::notes_of(const RouteCall& call) const {
  return static_cast<Notes&>(*call.task.notes[idx()]);
}

// Keeps, for each piece from first_piece on, the ranges of its tokens that the part sends. Drops pieces without any.
void StreamRoute::keep_ranges(const KeyPart& part, size_t first_piece, Notes* notes) {
  size_t n_kept = first_piece;
  for (size_t i = first_piece; i < notes->pieces.size(); ++i) {
    StreamPiece piece = notes->pieces[i];
    piece.first_range = notes->ranges.size();
    auto range = std::partition_point(part.ranges.begin(), part.ranges.end(),
                                      [&](const TokenRange& one) { return one.end <= piece.begin; });
    for (; range != part.ranges.end() && range->begin < piece.end; ++range)
      notes->ranges.push_back({std::max(range->begin, piece.begin), std::min(range->end, piece.end)});
    piece.n_ranges = notes->ranges.size() - piece.first_range;
    if (piece.n_ranges > 0) notes->pieces[n_kept++] = piece;
  }
  notes->pieces.resize(n_kept);
}

void StreamRoute::choose(const RouteCall& call, std::span<const KeyPart> parts, const StreamLayout& layout) {
  Notes& notes = notes_of(call);
  notes.layout = layout;
  notes.pieces.clear();
  notes.n_sent = 0;
  notes.ranges.clear();
  for (const KeyPart& part : parts) {
    const size_t first = notes.pieces.size();
    cut_pieces(layout, part.heads, part.call, part.tokens, &notes.pieces);
    if (part.has_ranges) keep_ranges(part, first, &notes);
  }
  call.task.n_pieces[idx()] = notes.pieces.size();
  if (notes.pieces.empty()) return;
  call.task.sent[idx()] = call.device.shared().flag(idx(), call.task.idx);
  std::atomic_ref(*call.task.sent[idx()]).store(0, std::memory_order_relaxed);
}

// Writes a descriptor for each piece, and the page table that all pieces share.
int64_t StreamRoute::describe(const RouteCall& call, std::byte* upload, const std::byte* descriptors) {
  Notes& notes = notes_of(call);
  auto* to = reinterpret_cast<DeviceSequence*>(upload);
  for (const StreamPiece& piece : notes.pieces) {
    const SequenceCall& of = call.calls[piece.call];
    *to = {};
    to->begin = piece.begin;
    to->end = piece.end;
    to->q_len = static_cast<int32_t>(of.q_len);
    to->first_row = static_cast<int32_t>(of.first_row);
    to->table_len = static_cast<int32_t>(notes.layout.n_pages);
    to->evict_end = piece.begin;
    to->n_after = of.length - piece.end;
    ++to;
  }
  auto* const table = reinterpret_cast<int64_t*>(to);
  for (int64_t i = 0; i < notes.layout.n_pages; ++i) table[i] = i * notes.layout.page_bytes;
  notes.described = reinterpret_cast<const DeviceSequence*>(descriptors);
  notes.page_table = reinterpret_cast<const int64_t*>(notes.described + notes.pieces.size());
  return reinterpret_cast<std::byte*>(table + notes.layout.n_pages) - upload;
}

// The store may grow meanwhile, so only the task's own view of the store is used.
void StreamRoute::list_copies(const RouteCall& call, const StreamPiece& piece, TokenRange tokens, std::byte* buffer,
                              CopyList* copies) const {
  const StreamLayout& layout = notes_of(call).layout;
  RowCursor rows(call.cache.store().view(call.calls[piece.call].sequence->pages, {}, call.task.bases),
                 static_cast<int32_t>(call.layer_idx), {piece.first_head, piece.n_heads}, tokens, kHeadPlanes,
                 RowOrder::kByRun);
  rows.stop_at_multiples(layout.page_len);
  for (RowRun run; rows.next(&run);) {
    std::byte* const page = buffer + run.token / layout.page_len % layout.n_pages * layout.page_bytes;
    copies->add(layout.row(page, run.plane, run.head - piece.first_head, run.token % layout.page_len), run);
  }
}

Status StreamRoute::send_next(const RouteCall& call) {
  Notes& notes = notes_of(call);
  if (notes.n_sent == notes.pieces.size()) return {};
  const TraceRange range("load k v", static_cast<int32_t>(call.layer_idx), "stream");
  const StreamPiece& piece = notes.pieces[notes.n_sent++];
  CopyList copies;
  std::byte* const buffer = buffers_->next();
  if (piece.n_ranges == 0) list_copies(call, piece, {piece.begin, piece.end}, buffer, &copies);
  for (size_t i = 0; i < piece.n_ranges; ++i) list_copies(call, piece, notes.ranges[piece.first_range + i], buffer, &copies);
  TANDEM_TRY(buffers_->send(copies.copies()));
  if (notes.n_sent < notes.pieces.size()) return {};
  return buffers_->mark(call.device.shared().flag_on_device(idx(), call.task.idx));
}

Status StreamRoute::begin(const RouteCall& call) {
  for (int64_t i = 0; i < StreamBuffers::kBuffers; ++i) TANDEM_TRY(send_next(call));
  return {};
}

Status StreamRoute::attend(const RouteCall& call, const DeviceAttend& window, size_t piece_idx, const HeadStates& to) {
  const Notes& notes = notes_of(call);
  const StreamPiece& piece = notes.pieces[piece_idx];
  std::byte* buffer = nullptr;
  TANDEM_TRY(buffers_->take(call.stream, &buffer));
  Layer layer;
  DeviceAttend attend = restrict_to_heads(window, piece.first_head, piece.n_heads, &layer);
  attend.pages = notes.layout.pages(buffer, notes.layout.page_len);
  attend.sequences.sequences = notes.described + piece_idx;
  attend.sequences.page_tables = notes.page_table;
  attend.sequences.n_sequences = 1;
  attend.sequences.max_keys = piece.end - piece.begin;
  point_states(to, &attend);
  TANDEM_TRY(call_device(call.device.device(), &DeviceTable::attend, &attend, call.stream));
  TANDEM_TRY(buffers_->done_with(call.stream));
  return send_next(call);
}

TokenRange StreamRoute::tokens_of(const RouteCall& call, size_t piece_idx) const {
  const StreamPiece& piece = notes_of(call).pieces[piece_idx];
  return {piece.begin, piece.end};
}

DeviceAccumulate StreamRoute::states_of(const RouteCall& call, size_t piece_idx) const {
  const StreamPiece& piece = notes_of(call).pieces[piece_idx];
  const SequenceCall& of = call.calls[piece.call];
  DeviceAccumulate states;
  states.first_row = static_cast<int32_t>(of.first_row);
  states.n_rows = static_cast<int32_t>(of.q_len);
  states.first_head = piece.first_head * call.layer.group_size;
  states.n_heads = piece.n_heads * call.layer.group_size;
  return states;
}

void StreamRoute::wait_after_failure(const RouteCall& call) noexcept { buffers_->settle(call.stream); }

}  // namespace tandem
