// SPDX-License-Identifier: MIT
// Long appends where keys are streamed, a chunk of thousands of tokens at a time (lib/routes/prefill_size.h):
//
// clang-format off
//   caller's stream                                                            side stream
//   for a group of KV heads:                                                   rows: append of all tickets, into pages
//     pieces   attend, with the states of those before | send the next piece   of the work space and to the host
//     chunk    attend to the window and the chunk's own keys, with the         |
//              states of the pieces, into the caller's tensors        <- join -'
//   keep       what of the chunk the window is to have
//   count      where the policy counts attention weights: the last queries, by a ticket of their own
// clang-format on
//
// The tasks of the tickets take rows alone; the last of them is also the one that is not finished while pieces are on their
// way, for the others' slots are waited for meanwhile. Where nothing is streamed yet, a chunk is attended in one go.
#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>

#include "lib/attend_call.h"
#include "lib/device_status.h"

namespace tandem {

struct AttendCall::Prefill {
  HandOverTask* task = nullptr;  // of the last ticket
  int64_t n_tickets = 0;
  uint64_t first_ticket = 0;
  DeviceSequences chunk;                      // all queries, over window and chunk
  const DeviceSequence* described = nullptr;  // of each ticket, in device memory, then of each piece
  const int64_t* piece_table = nullptr;
  DeviceAttend attend;  // to window and chunk
  size_t n_sent = 0, n_taken = 0;
  HeadStates states;
};

namespace {

constexpr int64_t kTicket = DeviceSession::kMostTokens;

}  // namespace

// The call's long appends, if there is memory for them and the store can be pinned.
Status AttendCall::take_prefill(const CallShape& shape) {
  if (session_.refuses_prefill_) return {};
  const SizeTerms terms = session_.terms();
  PrefillSize size;
  TANDEM_TRY(size_long(terms, shape, &size));
  if (size.n_tokens == 0) return {};
  bool is_pinned = true;
  for (size_t i = 0; i < scratch_.calls.size(); ++i)
    is_pinned = cache_.pin(*scratch_.calls[i].sequence, terms.streamed(shape, scratch_.shapes[i]).end) && is_pinned;
  if (!accept_pins(is_pinned)) return {};
  TANDEM_TRY(session_.device_->reserve_side());
  taken_.prefill = size;
  return {};
}

// Groups of fewer KV heads take less memory, and chunks of a ticket each less still: what there is a plan for may be an
// append to more keys, of which a group has fewer heads.
bool AttendCall::take_less_for_prefill(const Status& status) {
  if (taken_.prefill.n_tokens == 0 || !is_for_lack_of_memory(status)) return false;
  const PrefillSize lacking = std::exchange(taken_.prefill, {});
  if (lacking.layout.n_heads > 1 && session_.routes_.piece_heads == 0) {
    session_.most_prefill_bytes_ = lacking.area_bytes - 1;
    cache_.engine().log(TANDEM_LOG_INFO, "long appends attend to fewer KV heads at a time, as there is no memory for %d: %s",
                        lacking.layout.n_heads, status.info().message.c_str());
    return true;
  }
  session_.refuses_prefill_ = true;
  cache_.engine().log(TANDEM_LOG_WARNING,
                      "long appends stream all keys for every %lld tokens, as there is no memory for more: %s",
                      static_cast<long long>(kTicket), status.info().message.c_str());
  return true;
}

// Sinks of streaming heads come from the store: queries that see them otherwise are no long chunk's.
int64_t AttendCall::prefill_len(const ChunkPlace& place) const {
  const int64_t first_query = scratch_.calls[place.call].first_query + place.query;
  if (heads_ != nullptr && first_query < session_.options_.sink_len) return 0;
  const int64_t n_left = scratch_.calls[place.call].q_len - place.query;
  return n_left > std::min(taken_.prefill.n_tokens, kTicket) ? std::min(n_left, taken_.prefill.n_tokens) : 0;
}

Status AttendCall::run_prefill(int64_t n_tokens, ChunkPlace* place) {
  HandOver& hand_over = session_.device_->hand_over();
  HandOverTask& task = hand_over.next_task(tickets_of(n_tokens) - 1);
  TANDEM_TRY(hand_over.fault());  // as in run_chunk()
  const SequenceCall& whole = scratch_.calls[place->call];
  task.scratch.calls.assign(1, whole);
  SequenceCall& part = task.scratch.calls[0];
  part.q_len = n_tokens;
  part.first_row = 0;
  part.first_query = whole.first_query + place->query;
  part.length = part.first_query + n_tokens;
  const CutArgs cut(args_, whole.first_row + place->query, n_tokens);
  place->query += n_tokens;
  if (place->query == whole.q_len) *place = {place->call + 1, 0};
  AttendCall chunk(session_, cut.args, task.scratch);
  chunk.taken_ = taken_;
  return chunk.attend_prefill(&task);
}

Status AttendCall::attend_prefill(HandOverTask* task) {
  Prefill prefill;
  prefill.task = task;
  {
    std::unique_lock lock(cache_.mutex());
    prepare_prefill(task);
  }
  {
    std::shared_lock lock(cache_.mutex());
    TANDEM_TRY(fill_window(scratch_.calls[0]));
    wait_for_streamed_rows();
  }
  TANDEM_TRY(describe_prefill(task, &prefill));
  bool is_launched = false;
  const AtEnd cut([&] {
    if (!is_launched) session_.device_->side()->settle();
    if (!is_launched && !task->pieces.empty()) session_.device_->stream()->settle(args_.stream);
    task->is_cut = !is_launched;
  });
  TANDEM_TRY(launch_prefill(prefill));
  if (policy_.keeps_maw) TANDEM_TRY(count_tail());
  is_launched = true;
  std::unique_lock lock(cache_.mutex());
  TANDEM_TRY(session_.device_->hand_over().fault());  // what is lost is not committed
  commit_chunk();
  return {};
}

// The tasks of all tickets. The last one is this chunk's own: it has the pieces.
void AttendCall::prepare_prefill(HandOverTask* task) {
  HandOver& hand_over = session_.device_->hand_over();
  clear_scratch();
  SequenceCall& call = scratch_.calls[0];
  evict_before(&call);
  (void)set_visibility(call);  // likewise never cancelled
  choose_keys(call);
  choose_for_streaming_heads(call);
  call.cpu_begin = call.has_host ? call.host_end : call.host_begin;
  call.kept_begin = session_.evicted_to(*call.state, call.length);
  for (int64_t i = 0; i < tickets_of(call.q_len); ++i) {
    HandOverTask& taking = hand_over.next_task(i);
    SequenceCall rows = call;
    rows.first_query = call.first_query + i * kTicket;
    rows.q_len = std::min(kTicket, call.length - rows.first_query);
    rows.length = rows.first_query + rows.q_len;
    taking.step = 0;
    begin_task(&taking);
    taking.part.is_rows = true;
    taking.part.begins_long = i == 0;
    taking.shape.n_tokens = taking.shape.max_q_len = static_cast<int32_t>(rows.q_len);
    taking.scratch.host.add_rows(rows);
    taking.touched.push_back({call.sequence->id, rows.first_query, call.found_begin});
  }
  task->layout = taken_.prefill.layout;
  for (const HeadRun& run : all_runs_.get())
    cut_pieces(task->layout, {&run, 1}, 0,
               run.streams ? TokenRange{0, call.streaming_heads.keys.sink_end} : TokenRange{call.host_begin, call.cpu_begin},
               &task->pieces);
  if (task->pieces.empty()) return;
  task->bases = cache_.store().bases();
  task->part.layer = &outside_;
  task->part.key_bytes = token_kv_bytes(outside_);
  task->part.streamed_tokens = call.cpu_begin - call.host_begin;
  task->part.n_queries = call.q_len;  // the attention may take longer than the bus, of which nothing is learned
  task->streamed = session_.device_->streamed(task->idx);
  std::atomic_ref(*task->streamed).store(0, std::memory_order_relaxed);
  expect_pieces(task);
}

// When the last piece has crossed the bus, which waits for a buffer, the device has attended all but two. That tells of its
// pace where pieces are many and take longer than the bus, which nothing else uses, and where there are few other keys.
void AttendCall::expect_pieces(HandOverTask* task) const {
  constexpr int64_t kLeastPieces = 8, kMostOthers = 20;  // the latter: in parts of the keys that are streamed
  constexpr double kLonger = 1.2;
  const SequenceCall& call = scratch_.calls[0];
  const int64_t n_keys = call.cpu_begin - call.host_begin;
  if (heads_ != nullptr || session_.device_->device().bus->has_weights()) return;
  if (std::ssize(task->pieces) < kLeastPieces) return;
  if ((call.length - call.cpu_begin) * kMostOthers > n_keys) return;
  const double known_ns = cache_.engine().profile().prefill_tile_ns(layer_);
  const double tile_ns = known_ns > 0.0 ? known_ns : assumed_tile_ns(layer_);
  const auto ns_of = [&](double of_tile) {
    return prefill_ns(layer_, task->layout, call.q_len, n_keys, cache_.engine().device()->info.n_multiprocessors, of_tile);
  };
  const double ns = ns_of(tile_ns), least_ns = ns_of(0.0), n_pieces = static_cast<double>(task->pieces.size());
  if (ns < kLonger * least_ns) return;
  task->part.tile_ns = tile_ns;
  task->part.fixed_ns = least_ns * (n_pieces - 1.0) / n_pieces;
  task->part.expected_ns = (ns - least_ns) * (n_pieces - 2.0) / n_pieces;
}

// The first token of a long append's chunk that lies in the work space: those before it in its page are in the window.
int64_t AttendCall::prefill_pages_begin() const {
  if (taken_.prefill.n_tokens == 0) return INT64_MAX;
  return (scratch_.calls[0].first_query + kDevicePageLen - 1) / kDevicePageLen * kDevicePageLen;
}

// In one copy: the chunk, its tickets, its pieces; their page table; that of window and chunk.
Status AttendCall::describe_prefill(HandOverTask* task, Prefill* prefill) {
  DeviceSession& device = *session_.device_;
  const SequenceCall& call = scratch_.calls[0];
  prefill->n_tickets = tickets_of(call.q_len);
  std::byte* const upload = device.upload(task->idx);
  auto* const first = reinterpret_cast<DeviceSequence*>(upload);
  DeviceSequence* to = first;
  DeviceSequence chunk;
  chunk.begin = call.resident_begin;
  chunk.end = call.length;
  chunk.q_len = static_cast<int32_t>(call.q_len);
  chunk.evict_end = call.resident_begin;
  chunk.position = call.sequence->position(call.first_query);
  const int64_t first_page = call.resident_begin / kDevicePageLen, last_page = (call.length - 1) / kDevicePageLen;
  chunk.table_len = static_cast<int32_t>(last_page - first_page + 1);
  *to++ = chunk;
  if (heads_ != nullptr) describe_streaming_heads(first, to++);
  const int64_t n_chunks = to - first;
  for (int64_t i = 0; i < prefill->n_tickets; ++i) {
    DeviceSequence& rows = *to++ = chunk;
    rows.end = std::min(call.length, call.first_query + (i + 1) * kTicket);
    rows.q_len = static_cast<int32_t>(rows.end - call.first_query - i * kTicket);
  }
  task->pieces_at = reinterpret_cast<std::byte*>(to) - upload;
  auto* table = reinterpret_cast<int64_t*>(to + task->pieces.size());
  if (!task->pieces.empty()) describe_pieces(*task, to, table);
  const int64_t n_piece_pages = task->pieces.empty() ? 0 : task->layout.n_pages;
  table += n_piece_pages;
  const int64_t table_at = reinterpret_cast<std::byte*>(table) - upload;
  const int64_t area = reinterpret_cast<intptr_t>(device.prefill_area()) - device.geometry().layers[layer_idx_].at[0];
  const int64_t first_own = prefill_pages_begin() / kDevicePageLen;
  for (int64_t page = first_page; page <= last_page; ++page)
    table[page % chunk.table_len] =
        device.page_offset(page < first_own ? call.window->page_of(page * kDevicePageLen)
                                            : area + (page - first_own) * taken_.prefill.page_bytes);
  auto* const there = reinterpret_cast<DeviceSequence*>(device.descriptors());
  prefill->chunk.sequences = there;
  prefill->chunk.page_tables = reinterpret_cast<const int64_t*>(device.descriptors() + table_at);
  prefill->chunk.n_sequences = 1;
  prefill->chunk.max_q_len = chunk.q_len;
  prefill->chunk.max_keys = call.length - call.resident_begin;
  prefill->described = there + n_chunks;
  streaming_sequences_ = there + 1;
  prefill->piece_table = prefill->chunk.page_tables - n_piece_pages;
  return call_device(device.device(), &DeviceTable::copy, device.descriptors(), upload,
                     table_at + chunk.table_len * static_cast<int64_t>(sizeof(int64_t)), args_.stream);
}

// Rows of all tickets, to the work space and to the host, which takes them while pieces are attended.
Status AttendCall::hand_over_rows(const Prefill& prefill) {
  DeviceSession& device = *session_.device_;
  const TraceRange range("append", args_.layer_idx, "resident");
  TANDEM_TRY(device.side()->fork(args_.stream));
  for (int64_t i = 0; i < prefill.n_tickets; ++i) {
    const int64_t first = i * kTicket, n = std::min(kTicket, args_.q.n_tokens - first);
    DeviceAppend append;
    append.layer = prefill.attend.layer;
    append.pages = device.pages(layer_idx_);
    append.sequences = prefill.chunk;
    append.sequences.sequences = prefill.described + i;
    append.sequences.max_q_len = append.n_tokens = static_cast<int32_t>(n);
    append.k = rows_of(from_row(*args_.k, first, n));
    if (args_.v != nullptr) append.v = rows_of(from_row(*args_.v, first, n));
    if (args_.x != nullptr) append.x = rows_of(from_row(*args_.x, first, n));
    append.tag = TicketShape{args_.layer_idx, 0, append.n_tokens, append.n_tokens}.tag();
    append.exchange = device.exchange(layer_idx_);
    append.leaves_room = taken_.prefill.rows_have_time ? 2 : 1;
    TANDEM_TRY(call_device(device.device(), &DeviceTable::append, &append, device.side()->get()));
    device.hand_over().post();
  }
  return {};
}

Status AttendCall::launch_prefill(Prefill& prefill) {
  DeviceSession& device = *session_.device_;
  DeviceAttend& attend = prefill.attend;
  attend.layer = &device.layer(layer_idx_, true);
  attend.pages = device.pages(layer_idx_);
  attend.sequences = prefill.chunk;
  attend.q = rows_of(args_.q);
  attend.workspace = device.workspace();
  HandOverTask& task = *prefill.task;
  task.asked = std::chrono::steady_clock::now();
  TANDEM_TRY(begin_stream(&task));
  TANDEM_TRY(hand_over_rows(prefill));
  if (task.pieces.empty()) {
    TANDEM_TRY(device.side()->join(args_.stream));
    point_output(0, &attend);
    TANDEM_TRY(attend_window(attend, true));
    return keep_window();
  }
  prefill.n_sent = std::min(task.pieces.size(), static_cast<size_t>(StreamBuffers::kBuffers));
  std::byte* const area = device.prefill_area();
  prefill.states = {reinterpret_cast<float*>(area + taken_.prefill.o_at),
                    reinterpret_cast<float*>(area + taken_.prefill.lse_at), 0};
  for (const HeadRun& run : all_runs_.get())
    for (int32_t h = 0; h < run.n; h += task.layout.n_heads)
      TANDEM_TRY(attend_group(prefill, {run.first + h, std::min(task.layout.n_heads, run.n - h), run.streams}));
  return keep_window();
}

// Each piece's states come to those of the pieces before; the chunk comes last and leaves the answer.
Status AttendCall::attend_group(Prefill& prefill, const HeadRun& heads) {
  const HandOverTask& task = *prefill.task;
  StreamBuffers& buffers = *session_.device_->stream();
  Layer layer;
  DeviceAttend of_chunk = of_run(prefill.attend, heads, &layer);
  prefill.states.n_heads = layer.n_q_heads;
  DeviceAttend of_pieces = prefill.attend;
  of_pieces.sequences.page_tables = prefill.piece_table;
  const auto* described = prefill.described + prefill.n_tickets;
  while (prefill.n_taken < task.pieces.size()) {
    const StreamPiece& piece = task.pieces[prefill.n_taken];
    if (piece.first_head != heads.first) break;
    std::byte* buffer = nullptr;
    TANDEM_TRY(buffers.take(args_.stream, &buffer));
    TANDEM_TRY(attend_piece(of_pieces, task, piece, buffer, described + prefill.n_taken++, prefill.states));
    of_pieces.before_o = prefill.states.o;
    of_pieces.before_lse = prefill.states.lse;
    TANDEM_TRY(buffers.done_with(args_.stream));
    TANDEM_TRY(send_next(task, &prefill.n_sent));
  }
  if (heads.first == 0) TANDEM_TRY(session_.device_->side()->join(args_.stream));
  of_chunk.before_o = of_pieces.before_o;
  of_chunk.before_lse = of_pieces.before_lse;
  point_output(heads.first, &of_chunk);
  TANDEM_TRY(ask_device("attend", &DeviceTable::attend, &of_chunk));
  return {};
}

// The caller's tensors, from a KV head on.
void AttendCall::point_output(int32_t first_head, DeviceAttend* call) const {
  const float* sinks = session_.device_->sinks(layer_idx_);
  const int64_t first = int64_t{first_head} * layer_.group_size;
  call->o = rows_of(args_.o);
  call->o.data = static_cast<std::byte*>(call->o.data) + first * args_.o.head_stride;
  call->lse = args_.lse != nullptr ? args_.lse + first * args_.lse_head_stride : nullptr;
  call->lse_token_stride = args_.lse_token_stride;
  call->lse_head_stride = args_.lse_head_stride;
  if (taken_.prefill.row_lse_at > 0) {
    call->lse = row_lse() + first;
    call->lse_token_stride = layer_.n_q_heads;
    call->lse_head_stride = 1;
  }
  call->sinks = sinks != nullptr ? sinks + first : nullptr;
}

// Pages of the chunk take the place of those that have left the window.
Status AttendCall::keep_window() {
  const DeviceSession& device = *session_.device_;
  const SequenceCall& call = scratch_.calls[0];
  const WindowGeometry::LayerPlanes& planes = device.geometry().layers[layer_idx_];
  const int64_t first_own = prefill_pages_begin() / kDevicePageLen;
  call.window->make_way(layer_idx_, call.length);
  CopyList copies;
  int64_t before = 0;
  for (int64_t page = std::max(first_own, call.kept_begin / kDevicePageLen); page * kDevicePageLen < call.length; ++page) {
    const int64_t to = call.window->page_of(page * kDevicePageLen);
    if (to != before + device.geometry().page_bytes) copies.cut();  // a ring has one memory or several
    before = to;
    copies.add(reinterpret_cast<std::byte*>(to) + planes.at[0],
               device.prefill_area() + (page - first_own) * taken_.prefill.page_bytes, planes.bytes);
  }
  for (const StridedCopy& copy : copies.copies())
    TANDEM_TRY(call_device(device.device(), &DeviceTable::copy_strided, &copy, args_.stream));
  if (planes.maw_at < 0) return {};
  // Nobody has counted this chunk's queries yet, and weights of older ones have faded when the last of these are counted.
  const int64_t bytes = int64_t{layer_.n_q_heads} * kDevicePageLen * static_cast<int64_t>(sizeof(float));
  for (const int64_t page : call.window->table())
    TANDEM_TRY(call_device(device.device(), &DeviceTable::fill, reinterpret_cast<std::byte*>(page) + planes.maw_at, 0, bytes,
                           args_.stream));
  return {};
}

float* AttendCall::row_lse() const {
  return reinterpret_cast<float*>(session_.device_->prefill_area() + taken_.prefill.row_lse_at);
}

// To the caller, who may want it too.
Status AttendCall::give_lse() const {
  if (args_.lse == nullptr) return {};
  StridedCopy copy;
  copy.to = args_.lse;
  copy.from = row_lse();
  copy.row_bytes = copy.from_stride = int64_t{layer_.n_q_heads} * 4;  // heads lie side by side at the caller's, too
  copy.n_rows = args_.q.n_tokens;
  copy.to_stride = args_.lse_token_stride * 4;
  return call_device(session_.device_->device(), &DeviceTable::copy_strided, &copy, args_.stream);
}

// Attention weights of an append count with its last queries alone, as those of older ones have faded. These queries, which
// have been attended with the chunk, have a ticket of their own: it brings them and their lse to the host, which counts them
// when keys are judged, and the device counts them for the window's keys.
Status AttendCall::count_tail() {
  constexpr int64_t kTile = 64;  // queries
  TANDEM_TRY(give_lse());
  HandOver& hand_over = session_.device_->hand_over();
  HandOverTask& task = hand_over.next_task();
  TANDEM_TRY(hand_over.fault());
  task.step = 0;
  task.scratch.calls.assign(1, scratch_.calls[0]);
  SequenceCall& tail = task.scratch.calls[0];
  const int64_t n_counted = counted_queries(session_.options_.alpha);
  const int64_t n = std::min({tail.q_len, kTicket, (n_counted + kTile - 1) / kTile * kTile}), first = tail.q_len - n;
  tail.q_len = n;
  tail.first_row = 0;
  tail.first_query = tail.length - n;
  tail.host_begin = tail.cpu_begin = tail.host_end = tail.resident_begin = tail.kept_begin;
  tail.has_host = tail.kept_begin > 0;
  tail.only_counts = true;
  CutArgs cut(args_, first, n);
  cut.args.k = cut.args.v = cut.args.x = nullptr;
  AttendCall counted(session_, cut.args, task.scratch);
  {
    std::unique_lock lock(cache_.mutex());
    counted.prepare_count(&task);
  }
  bool is_launched = false;
  const AtEnd cut_off([&] { task.is_cut = !is_launched; });
  TANDEM_TRY(counted.launch_count(row_lse() + first * layer_.n_q_heads, &task));
  is_launched = true;
  return {};
}

void AttendCall::prepare_count(HandOverTask* task) {
  clear_scratch();
  begin_task(task);
  SequenceCall& call = scratch_.calls[0];
  task->shape.n_tokens = task->shape.max_q_len = static_cast<int32_t>(call.q_len);
  (void)set_visibility(call);  // never cancelled
  point_visibility();
  scratch_.host.lay_out(scratch_.calls);
  task->touched.push_back({call.sequence->id, call.length, call.found_begin});
  prepare_selection();
}

// lse: of these queries.
Status AttendCall::launch_count(const float* lse, HandOverTask* task) {
  DeviceSession& device = *session_.device_;
  DeviceAppend append;
  TANDEM_TRY(upload_descriptors(task, &append.sequences));
  append.layer = &device.layer(layer_idx_, true);
  append.pages = device.pages(layer_idx_);
  append.q = rows_of(args_.q);
  append.n_tokens = static_cast<int32_t>(args_.q.n_tokens);
  append.tag = TicketShape{args_.layer_idx, 0, append.n_tokens, append.n_tokens}.tag();
  append.exchange = device.exchange(layer_idx_);
  TANDEM_TRY(ask_device("append", &DeviceTable::append, &append));
  device.hand_over().post();
  TANDEM_TRY(call_device(device.device(), &DeviceTable::copy, device.slot(task->ticket) + append.exchange.lse_at, lse,
                         append.n_tokens * layer_.n_q_heads * int64_t{4}, args_.stream));
  return observe(append, lse);
}

}  // namespace tandem
