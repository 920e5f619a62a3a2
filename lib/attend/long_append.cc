// SPDX-License-Identifier: MIT
#include "lib/attend/long_append.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>

#include "lib/attend/call_keys.h"
#include "lib/attend/descriptors.h"
#include "lib/attend/device_chunk.h"
#include "lib/attend/device_launch.h"
#include "lib/attend/pattern_call.h"
#include "lib/attend/search_call.h"
#include "lib/attend/session_states.h"
#include "lib/attend/split.h"
#include "lib/attend/window_fill.h"
#include "lib/pieces/stream_pieces.h"

namespace tandem {

struct LongAppend::Work {
  DeviceSequences chunk;                    // all queries, over window and chunk
  const DeviceSequence* tickets = nullptr;  // in device memory, of the tickets that bring rows
  TilePages pages;                          // of window and chunk
  DeviceAttend attend;                      // attention over window and chunk
  size_t n_taken = 0;                       // pieces attended so far
  HeadStates states;                        // of the current group of heads
};

namespace {

constexpr int64_t kTicket = kMostTicketTokens;

const SequenceCall& sequence_of(const Call& chunk) { return chunk.calls()[0]; }

// Returns the first token of the chunk that is in the work space. Earlier tokens of its page are in the window. INT64_MAX if
// the window's ring has room for the whole chunk. 0 if all keys of the layer have been brought, as they are in the work
// space.
int64_t own_pages_begin(const Call& chunk) {
  if (chunk.taken.prefill.brings_layer()) return 0;
  const SequenceCall& of = sequence_of(chunk);
  const int64_t n_pages = (of.length - 1) / kDevicePageLen - of.resident_begin / kDevicePageLen + 1;
  if (n_pages <= of.window->n_pages()) return INT64_MAX;
  return (of.first_query + kDevicePageLen - 1) / kDevicePageLen * kDevicePageLen;
}

float* row_lse(const Call& chunk) {
  return reinterpret_cast<float*>(chunk.device().work().prefill_area() + chunk.taken.prefill.row_lse_at);
}

// Sends the heads' answer to the caller's tensors. If the lse of all queries are kept, they first go to the work space.
void point_answer(const Call& chunk, int32_t first_head, DeviceAttend* attend) {
  point_to(output_of(chunk, first_head), attend);
  if (chunk.taken.prefill.row_lse_at == 0) return;
  attend->lse = row_lse(chunk) + int64_t{first_head} * chunk.layer().group_size;
  attend->lse_token_stride = chunk.layer().n_q_heads;
  attend->lse_head_stride = 1;
}

// Returns whether the query has keys outside the window.
bool sees_outside(const Call& call, const SequenceCall& of, int64_t query) {
  const int64_t sliding_window = call.layer().sliding_window;
  const int64_t first_seen =
      sliding_window > 0 ? of.sequence->first_within(of.sequence->position(query), sliding_window) : 0;
  return call.session.evicted_to(of.state->window_begin, query) > first_seen;
}

// Checks that an append under head patterns will find all keys on the device.
Status check_brought(const Call& call, const PrefillSize& size) {
  if (!follows_patterns(call)) return {};
  for (const SequenceCall& of : call.calls()) {
    const int64_t outside_end = of.is_append ? call.session.evicted_to(of.state->window_begin, of.length - 1) : 0;
    if (outside_end == 0 || of.length <= size.whole_tokens) continue;
    return fail(TANDEM_ERROR_CAPACITY, "window_tokens",
                "window_tokens = %lld: under policy \"%s\" of layer %d the device has no kernels that would attend the %lld "
                "tokens outside the window",
                static_cast<long long>(call.session.options.window_len), call.facts.policy.name, call.args.layer_idx,
                static_cast<long long>(outside_end));
  }
  return {};
}

}  // namespace

Status LongAppend::size_and_pin(Call& call, const CallShape& shape) {
  const bool searches = call.facts.policy.names_keys();
  const bool refuses = (searches ? core_.refuses_long_searches : core_.refuses_long) || call.goes_short;
  if (refuses && !follows_patterns(call)) return {};
  const SizeTerms terms = core_.terms();
  PrefillSize size;
  TANDEM_TRY(size_long(terms, shape, call.taken.uses[kPlanStream], &size));
  TANDEM_TRY(check_brought(call, size));
  if (size.n_tokens == 0 || (refuses && !size.brings_layer())) return {};
  RoutesTaken taken = call.taken;
  taken.prefill = size;
  const bool has_room = !call.device().is_frozen() || call.device().held().has_room(reserve_call(terms, shape, taken));
  if (!has_room && !size.brings_layer()) {
    if (!std::exchange(core_.has_told_of_graphs, true))
      call.cache().engine().log(
          TANDEM_LOG_INFO, "long appends are attended %lld tokens at a time, as graphs hold the session's memory as it is",
          static_cast<long long>(kTicket));
    return {};
  }
  bool is_pinned = true;
  for (size_t i = 0; size.streams() && i < call.calls().size(); ++i)
    is_pinned = call.cache().pin(*call.calls()[i].sequence, call.args.layer_idx,
                                 {0, terms.streamed(shape, call.scratch.shapes[i]).end}) &&
                is_pinned;
  if (!accept_pins(call, is_pinned)) return {};
  if (size.brings_layer()) {
    // If memory cannot be pinned, the copies only take longer.
    for (const SequenceCall& of : call.calls())
      if (of.is_append) (void)call.cache().pin(*of.sequence, call.args.layer_idx, {0, of.first_query});
    TANDEM_TRY(whole_.reserve(call, size.whole_tokens));
  }
  TANDEM_TRY(call.device().reserve_side());
  call.taken.prefill = size;
  rows_.choose_way(call);
  return {};
}

// Groups of fewer KV heads take less memory, and chunks of one ticket still less. The size at hand can be too large although
// memory was planned: the plan may be for an append to more keys, whose groups have fewer heads.
bool LongAppend::retry_smaller(Call& call, const Status& lack) {
  if (call.taken.prefill.n_tokens == 0 || call.taken.prefill.brings_layer() || !is_for_lack_of_memory(lack)) return false;
  const PrefillSize lacking = std::exchange(call.taken.prefill, {});
  if (call.args.named != nullptr) {  // its lists may need more than all the rest, so other calls may have room
    call.goes_short = true;
    call.cache().engine().log(TANDEM_LOG_WARNING,
                              "the CPU attends the keys that a long append names, as there is no memory for their lists: %s",
                              lack.info().message.c_str());
    return true;
  }
  if (lacking.layout.n_heads > 1 && core_.routes.piece_heads == 0) {
    core_.most_long_bytes = lacking.area_bytes - 1;
    call.cache().engine().log(TANDEM_LOG_INFO,
                              "long appends attend to fewer KV heads at a time, as there is no memory for %d: %s",
                              lacking.layout.n_heads, lack.info().message.c_str());
    return true;
  }
  (call.facts.policy.names_keys() ? core_.refuses_long_searches : core_.refuses_long) = true;
  call.cache().engine().log(TANDEM_LOG_WARNING,
                            "long appends are attended %lld tokens at a time, as there is no memory for more: %s",
                            static_cast<long long>(kTicket), lack.info().message.c_str());
  return true;
}

// Sinks of streaming heads come from the store, so queries before the sinks' end are left to ordinary chunks. Kernels that
// rotate get the position of the first query only, so positions must be consecutive.
int64_t LongAppend::chunk_len(const Call& call, const ChunkPlace& place) const {
  const PrefillSize& size = call.taken.prefill;
  const SequenceCall& whole = call.calls()[place.call];
  const int64_t first_query = whole.first_query + place.query;
  if (size.brings_layer()) return whole.is_append ? std::min(whole.q_len - place.query, size.n_tokens) : 0;
  if (size.n_tokens == 0 || (call.facts.heads != nullptr && first_query < core_.options.sink_len)) return 0;
  if (!size.streams() && sees_outside(call, whole, first_query)) return 0;
  int64_t n_left = whole.q_len - place.query;
  if (call.layer().rope != nullptr) n_left = consecutive(whole.sequence->positions, first_query, n_left);
  return n_left > std::min(size.n_tokens, kTicket) ? std::min(n_left, size.n_tokens) : 0;
}

Status LongAppend::next_chunk(Call& call, int64_t n_tokens, ChunkPlace* place, Chunk* chunk) {
  HandOver& hand_over = core_.hand_over();
  HandOverTask& task = hand_over.next_task(ChunkRows::n_tasks(call.taken.prefill, n_tokens) - 1);
  TANDEM_TRY(hand_over.fault());  // as in DeviceLane::next_chunk()
  const SequenceCall& whole = call.calls()[place->call];
  task.scratch.calls.assign(1, whole);
  SequenceCall& part = task.scratch.calls[0];
  part.q_len = n_tokens;
  part.first_row = 0;
  part.first_query = whole.first_query + place->query;
  part.length = part.first_query + n_tokens;
  const int64_t first_row = whole.first_row + place->query;
  chunk->args.emplace(call.args, first_row, n_tokens);
  const bool names = std::exchange(chunk->args->args.named, nullptr) != nullptr;  // the chunk's tickets bring no indices
  task.scratch.named = call.scratch.named;
  task.scratch.named.idx += first_row * task.scratch.named.token_stride;
  tiles_.begin(names ? &task.scratch.named : nullptr, part, call.layer());
  place->query += n_tokens;
  is_last_ = place->query == whole.q_len;
  if (is_last_) *place = {place->call + 1, 0};
  chunk->own.emplace(core_, chunk->args->args, task.scratch, &task);
  chunk->call = &*chunk->own;
  chunk->call->taken = call.taken;
  chunk->work = this;
  return {};
}

// The chunk's own task holds the pieces.
Status LongAppend::prepare(Call& chunk) {
  clear_visibility(chunk.scratch);
  SequenceCall& of = chunk.calls()[0];
  evict_before(chunk, &of);
  (void)see_keys(chunk, of);                 // fails only if a call is cancelled; a call on a device cannot be
  if (chunk.taken.prefill.brings_layer()) {  // all keys are resident to its kernels
    of.host_begin = of.host_end = of.resident_begin = 0;
    of.has_host = false;
  }
  of.cpu_begin = of.has_host ? of.host_end : of.host_begin;
  of.kept_begin = core_.evicted_to(of.state->window_begin, of.length);
  rows_.prepare(chunk);
  chunk.task->named_in = of.state;
  chunk.task->named = tiles_.of_last_query(chunk);
  if (chunk.taken.prefill.streams()) choose_pieces(chunk);
  return {};
}

// Pieces of named keys belong to one group of heads each, whose queries attend them. They have the keys that any of these
// heads names.
void LongAppend::choose_pieces(Call& chunk) {
  HandOverTask& task = *chunk.task;
  const SequenceCall& of = sequence_of(chunk);
  const StreamLayout& layout = chunk.taken.prefill.layout;
  const TokenRange outside{of.host_begin, of.cpu_begin};
  const auto choose = [&](std::span<const KeyPart> parts) { route().choose(chunk.route_call(), parts, layout); };
  std::vector<KeyPart>& parts = chunk.scratch.parts[kPlanStream];
  parts.clear();
  int64_t n_sent = outside.end - outside.begin;
  if (tiles_.any()) {
    std::vector<HeadRun> groups;
    std::vector<std::vector<TokenRange>> named;
    n_sent = 0;
    for (int32_t h = 0; h < chunk.layer().n_kv_heads; h += layout.n_heads) {
      groups.push_back({h, std::min(layout.n_heads, chunk.layer().n_kv_heads - h), false});
      const std::span<const TokenRange> ranges = tiles_.named_of({h, groups.back().n}, outside);
      for (const TokenRange& range : ranges) n_sent += (range.end - range.begin) * groups.back().n;
      named.emplace_back(ranges.begin(), ranges.end());
    }
    n_sent /= chunk.layer().n_kv_heads;
    for (size_t i = 0; i < groups.size(); ++i) parts.push_back({0, {&groups[i], 1}, outside, true, named[i]});
    choose(parts);
    parts.clear();  // they point to locals
  } else {
    for (const HeadRun& run : chunk.facts.all_runs.get())
      parts.push_back({0, {&run, 1}, run.streams ? TokenRange{0, of.streaming_heads.keys.sink_end} : outside});
    choose(parts);
  }
  if (task.n_pieces[kPlanStream] == 0) return;
  task.bases = chunk.cache().store().bases();
  task.part.layer = &chunk.facts.outside;
  task.part.key_bytes = token_kv_bytes(chunk.facts.outside);
  task.part.streamed_tokens = n_sent;
  task.part.n_pieces = static_cast<int64_t>(task.n_pieces[kPlanStream]);
  task.part.n_queries = of.q_len;  // attention may take longer than the bus, so nothing is learned about the bus
  if (!tiles_.any()) expect_pieces(chunk);
}

Status LongAppend::fill(Call& chunk) {
  const SequenceCall& of = sequence_of(chunk);
  if (chunk.taken.prefill.brings_layer()) {
    whole_.list(chunk);
    (void)of.window->begin_use(chunk.facts.idx);  // pages of the chunk will be copied to the window
    return {};
  }
  TANDEM_TRY(fill_window(chunk, of, own_pages_begin(chunk)));
  wait_for_sent_rows(chunk);
  const int64_t sink_end = of.streaming_heads.keys.sink_end;
  if (sink_end > 0) core_.hand_over().wait_for_rows(of.sequence->id, chunk.args.layer_idx, sink_end);
  return {};
}

Status LongAppend::launch(Call& chunk) {
  Work work;
  bool is_launched = false;
  const AtEnd undo([&] {
    if (is_launched) return;
    chunk.device().side()->settle();
    if (chunk.task->n_pieces[kPlanStream] > 0) route().wait_after_failure(chunk.route_call());
    if (chunk.taken.prefill.brings_layer()) whole_.settle(chunk.args.stream);
    chunk.task->launch_failed = true;
  });
  // The ticket follows the copies from the store, so the store does not change until they have ended.
  if (chunk.taken.prefill.brings_layer()) TANDEM_TRY(whole_.bring(chunk, &chunk.whole_layer));
  TANDEM_TRY(describe(chunk, &work));
  TANDEM_TRY(launch_all(chunk, work));
  if (chunk.taken.prefill.brings_layer()) TANDEM_TRY(whole_.done(chunk, is_last_));
  if (chunk.facts.policy.keeps_maw) TANDEM_TRY(count_tail(chunk));
  is_launched = true;
  return {};
}

Status LongAppend::commit(Call& chunk) {
  TANDEM_TRY(core_.hand_over().fault());  // a lost chunk is not committed
  commit_sequences(chunk);
  if (tiles_.any()) count_named(chunk);
  return {};
}

// Corrects the statistics for named keys: a key of a chunk counts once for each KV head that reads it.
void LongAppend::count_named(const Call& chunk) {
  const SequenceCall& of = sequence_of(chunk);
  const int64_t key_bytes = plane_bytes(chunk.layer()).total();
  const auto add = [&](TokenRange tokens, int64_t* sum) {
    for (int32_t h = 0; h < chunk.layer().n_kv_heads; ++h) {
      *sum -= (tokens.end - tokens.begin) * key_bytes;  // count_bytes() has counted all tokens
      for (const TokenRange& named : tiles_.named_of({h, 1}, tokens)) *sum += (named.end - named.begin) * key_bytes;
    }
  };
  add({of.resident_begin, of.length}, &chunk.session.sums.resident_kv_bytes_read);
  add({of.host_begin, of.host_end}, &chunk.session.sums.host_kv_bytes_read);
}

// Sets the times from which the profile learns the device's pace. The bus can be only two pieces ahead of the device, as
// there are two buffers. So when the last piece has crossed the bus, the device has attended all pieces but two, and the
// elapsed time is the device's. This holds only if there are many pieces, the device takes longer over them than the bus,
// nothing else uses the bus, and few keys are not streamed.
void LongAppend::expect_pieces(const Call& chunk) const {
  constexpr double kLeastPieces = 8.0;
  constexpr int64_t kMostOthers = 20;  // at least so many streamed keys for each other key
  constexpr double kLonger = 1.2;
  HandOverTask& task = *chunk.task;
  const SequenceCall& of = sequence_of(chunk);
  const Layer& layer = chunk.layer();
  const Engine& engine = chunk.cache().engine();
  const auto n_pieces = static_cast<double>(task.n_pieces[kPlanStream]);
  const int64_t n_keys = of.cpu_begin - of.host_begin;
  if (chunk.facts.heads != nullptr || chunk.device().device().bus->has_weights()) return;
  if (n_pieces < kLeastPieces) return;
  if ((of.length - of.cpu_begin) * kMostOthers > n_keys) return;
  const double known_ns = chunk.cache().engine().profile().prefill_tile_ns(layer);
  const double tile_ns = known_ns > 0.0 ? known_ns : assumed_tile_ns(layer);
  const auto ns_of = [&](double of_tile) {
    return prefill_ns(layer, chunk.taken.prefill.layout, of.q_len, n_keys, engine.device()->info.n_multiprocessors, of_tile);
  };
  const double ns = ns_of(tile_ns), least_ns = ns_of(0.0);
  if (ns < kLonger * least_ns) return;
  task.part.tile_ns = tile_ns;
  task.part.fixed_ns = least_ns * (n_pieces - 1.0) / n_pieces;
  task.part.expected_ns = (ns - least_ns) * (n_pieces - 2.0) / n_pieces;
}

// Uploads in one copy: the chunk, tickets that bring its rows, query blocks and their parts, its key lists, its pieces with
// their page table, and the page table of window and chunk.
Status LongAppend::describe(Call& chunk, Work* work) const {
  DeviceSession& device = chunk.device();
  const SequenceCall& of = sequence_of(chunk);
  std::byte* const upload = device.shared().upload(chunk.task->idx);
  auto* to = reinterpret_cast<DeviceSequence*>(upload);
  DeviceSequence described;
  described.begin = of.resident_begin;
  described.end = of.length;
  described.q_len = static_cast<int32_t>(of.q_len);
  described.evict_end = of.resident_begin;
  described.position = of.sequence->position(of.first_query);
  const int64_t first_page = of.resident_begin / kDevicePageLen, last_page = (of.length - 1) / kDevicePageLen;
  described.table_len = static_cast<int32_t>(last_page - first_page + 1);
  DeviceSequence* const whole = to;
  *to++ = described;
  const int64_t n_tickets = ChunkRows::describe_tickets(chunk, described, to), n_blocks = n_described(chunk),
                n_parts = n_pattern_parts(chunk);
  to += n_tickets + n_blocks + n_parts;
  int64_t bytes = reinterpret_cast<std::byte*>(to) - upload;
  bytes += describe_lists_at(chunk, upload + bytes, device.work().descriptors() + bytes);
  if (chunk.task->n_pieces[kPlanStream] > 0)
    bytes += route().describe(chunk.route_call(), upload + bytes, device.work().descriptors() + bytes);
  auto* const table = reinterpret_cast<int64_t*>(upload + bytes);
  const int64_t first_own = own_pages_begin(chunk) / kDevicePageLen,
                own_at = device.geometry().layers[chunk.facts.idx].at[0];
  for (int64_t page = first_page; page <= last_page; ++page)
    table[page % described.table_len] =
        device.page_offset(page < first_own ? of.window->page_of(page * kDevicePageLen)
                                            : reinterpret_cast<intptr_t>(page_of(chunk, page)) - own_at);
  auto* const there = reinterpret_cast<DeviceSequence*>(device.work().descriptors());
  work->chunk.sequences = there;
  work->chunk.page_tables = reinterpret_cast<const int64_t*>(device.work().descriptors() + bytes);
  work->chunk.n_sequences = 1;
  work->chunk.max_q_len = described.q_len;
  work->chunk.max_keys = of.length - of.resident_begin;
  work->tickets = there + 1;
  if (n_blocks > 0) describe_search(chunk, work->chunk, whole, n_tickets);
  if (n_parts > 0) describe_parts(chunk, work->chunk, whole, n_tickets);
  work->pages = {table, described.table_len, kDevicePageLen};
  return call_device(device.device(), &DeviceTable::copy, device.work().descriptors(), upload,
                     bytes + described.table_len * static_cast<int64_t>(sizeof(int64_t)), chunk.args.stream);
}

// Returns the chunk's append. Only rotated queries are copied to the work space.
DeviceAppend LongAppend::append_of_chunk(const Call& chunk, const DeviceSequences& sequences) const {
  DeviceAppend append = append_of(chunk, sequences);
  if (rotates_queries(chunk.layer()))
    append.rotated_q = reinterpret_cast<float*>(chunk.device().work().prefill_area() + chunk.taken.prefill.q_at);
  else
    append.q = {};
  return append;
}

Status LongAppend::launch_all(Call& chunk, Work& work) {
  DeviceSession& device = chunk.device();
  HandOverTask& task = *chunk.task;
  DeviceAttend& attend = work.attend;
  attend.layer = &device.layer(chunk.facts.idx, true);
  attend.pages = device.pages(chunk.facts.idx);
  attend.sequences = work.chunk;
  const DeviceAppend append = append_of_chunk(chunk, work.chunk);
  attend.q = append.q.data != nullptr ? attended_q(append) : rows_of(chunk.args.q);
  attend.workspace = device.work().workspace();
  attend.lists = chunk.lists;
  const bool has_pieces = task.n_pieces[kPlanStream] > 0;
  task.asked = std::chrono::steady_clock::now();
  if (has_pieces) TANDEM_TRY(route().begin(chunk.route_call()));
  TANDEM_TRY(rows_.send(chunk, append, work.tickets));
  if (!has_pieces) {
    TANDEM_TRY(wait_for_rows(chunk));
    TANDEM_TRY(search_keys(chunk, work.chunk, attend.q, append));
    if (chunk.queries.sequences != nullptr) attend.sequences = chunk.queries;
    attend.lists = chunk.lists;
    point_answer(chunk, 0, &attend);
    TANDEM_TRY(name_window(chunk, work, {0, chunk.layer().n_kv_heads}, &attend));
    TANDEM_TRY(follows_patterns(chunk) ? attend_patterns(chunk, attend) : attend_window(chunk, attend));
    return keep_window(chunk);
  }
  std::byte* const area = device.work().prefill_area();
  const PrefillSize& size = chunk.taken.prefill;
  work.states = {reinterpret_cast<float*>(area + size.o_at), reinterpret_cast<float*>(area + size.lse_at), 0};
  for (const HeadRun& run : chunk.facts.all_runs.get())
    for (int32_t h = 0; h < run.n; h += size.layout.n_heads)
      TANDEM_TRY(attend_group(chunk, work, {run.first + h, std::min(size.layout.n_heads, run.n - h), run.streams}));
  return keep_window(chunk);
}

// Waits for rows that tickets bring, as these are written on the side stream.
Status LongAppend::wait_for_rows(const Call& chunk) const {
  return chunk.taken.prefill.copies_rows ? Status() : join_side(chunk.device(), chunk.args.stream);
}

Status LongAppend::name_window(const Call& chunk, const Work& work, HeadRange heads, DeviceAttend* launch) {
  if (!tiles_.any()) return {};
  return tiles_.send(chunk, heads, {sequence_of(chunk).resident_begin, sequence_of(chunk).length}, work.pages, launch);
}

Status LongAppend::name_piece(const Call& chunk, size_t piece, HeadRange heads, DeviceAttend* launch) {
  if (!tiles_.any()) return {};
  const StreamLayout& layout = chunk.taken.prefill.layout;
  std::vector<int64_t>& table = piece_table_;
  table.resize(static_cast<size_t>(layout.n_pages));
  for (int64_t i = 0; i < layout.n_pages; ++i) table[static_cast<size_t>(i)] = i * layout.page_bytes;
  return tiles_.send(chunk, heads, route().tokens_of(chunk.route_call(), piece),
                     {table.data(), static_cast<int32_t>(table.size()), layout.page_len}, launch);
}

// Attends the pieces of a group of heads, each adding the states of the pieces before. The chunk comes last and writes the
// answer.
Status LongAppend::attend_group(const Call& chunk, Work& work, const HeadRun& heads) {
  const RouteCall seen = chunk.route_call();
  Layer layer;
  DeviceAttend of_chunk = restrict_to_heads(work.attend, heads.first, heads.n, &layer);
  work.states.n_heads = layer.n_q_heads;
  DeviceAttend of_pieces = work.attend;
  of_pieces.lists = {};  // a piece has heads that attend all of it
  while (work.n_taken < chunk.task->n_pieces[kPlanStream]) {
    if (route().states_of(seen, work.n_taken).first_head != heads.first * chunk.layer().group_size) break;
    TANDEM_TRY(name_piece(chunk, work.n_taken, {heads.first, heads.n}, &of_pieces));
    TANDEM_TRY(route().attend(seen, of_pieces, work.n_taken++, work.states));
    of_pieces.before_o = work.states.o;
    of_pieces.before_lse = work.states.lse;
  }
  if (heads.first == 0) TANDEM_TRY(wait_for_rows(chunk));
  of_chunk.before_o = of_pieces.before_o;
  of_chunk.before_lse = of_pieces.before_lse;
  point_answer(chunk, heads.first, &of_chunk);
  TANDEM_TRY(name_window(chunk, work, {heads.first, heads.n}, &of_chunk));
  return call_device(chunk.device().device(), &DeviceTable::attend, &of_chunk, chunk.args.stream);
}

// Returns the address of a page that is not in the window's ring.
std::byte* LongAppend::page_of(const Call& chunk, int64_t page) const {
  const int64_t first_own = own_pages_begin(chunk) / kDevicePageLen;
  std::byte* const first = chunk.whole_layer != nullptr ? chunk.whole_layer : chunk.device().work().prefill_area();
  return first + (page - first_own) * chunk.device().geometry().layers[chunk.facts.idx].bytes;
}

// Copies pages of the chunk to the places of evicted pages.
Status LongAppend::keep_window(const Call& chunk) const {
  const DeviceSession& device = chunk.device();
  const SequenceCall& of = sequence_of(chunk);
  const size_t l = chunk.facts.idx;
  const WindowGeometry::LayerPlanes& planes = device.geometry().layers[l];
  const int64_t first_own = own_pages_begin(chunk) / kDevicePageLen, n_pages = (of.length - 1) / kDevicePageLen + 1;
  of.window->make_way(l, of.length);
  CopyList copies;
  for (int64_t page = std::max(first_own, of.kept_begin / kDevicePageLen); page < n_pages; ++page) {
    std::byte* const to = copies.begin_page(*of.window, page * kDevicePageLen, device.geometry().page_bytes);
    copies.add(to + planes.at[0], page_of(chunk, page), planes.bytes);
  }
  for (const StridedCopy& copy : copies.copies())
    TANDEM_TRY(call_device(device.device(), &DeviceTable::copy_strided, &copy, chunk.args.stream));
  if (planes.maw_at < 0) return {};
  // Resets the MAW to 0. This chunk's queries are not counted yet, and older weights fade when its last queries are counted.
  const int64_t bytes = int64_t{chunk.layer().n_q_heads} * kDevicePageLen * static_cast<int64_t>(sizeof(float));
  for (const int64_t page : of.window->table())
    if (page != 0)
      TANDEM_TRY(call_device(device.device(), &DeviceTable::fill, reinterpret_cast<std::byte*>(page) + planes.maw_at, 0,
                             bytes, chunk.args.stream));
  return {};
}

// Copies the lse to the caller, if wanted.
Status LongAppend::give_lse(const Call& chunk) const {
  const AttendArgs& args = chunk.args;
  if (args.lse == nullptr) return {};
  StridedCopy copy;
  copy.to = args.lse;
  copy.from = row_lse(chunk);
  copy.row_bytes = copy.from_stride = int64_t{chunk.layer().n_q_heads} * 4;  // the caller's heads are contiguous, too
  copy.n_rows = args.q.n_tokens;
  copy.to_stride = args.lse_token_stride * 4;
  return call_device(chunk.device().device(), &DeviceTable::copy_strided, &copy, args.stream);
}

// Counts attention weights of the append's last queries only, as those of older queries have faded. These queries have been
// attended with the chunk and get a ticket of their own. The ticket brings them and their lse to the host, which counts them
// when keys are judged. The device counts them for the window's keys.
Status LongAppend::count_tail(const Call& chunk) const {
  constexpr int64_t kTile = 64;  // queries
  TANDEM_TRY(give_lse(chunk));
  HandOver& hand_over = core_.hand_over();
  HandOverTask& task = hand_over.next_task();
  TANDEM_TRY(hand_over.fault());
  task.step = 0;
  task.scratch.calls.assign(1, sequence_of(chunk));
  SequenceCall& tail = task.scratch.calls[0];
  const int64_t n_counted = counted_queries(core_.options.alpha);
  const int64_t n = std::min({tail.q_len, kTicket, (n_counted + kTile - 1) / kTile * kTile}), first = tail.q_len - n;
  tail.q_len = n;
  tail.first_row = 0;
  tail.first_query = tail.length - n;
  tail.host_begin = tail.cpu_begin = tail.host_end = tail.resident_begin = tail.kept_begin;
  tail.has_host = tail.kept_begin > 0;
  tail.only_counts = true;
  CutArgs cut(chunk.args, first, n);
  cut.args.k = cut.args.v = cut.args.x = nullptr;
  Call counted(core_, cut.args, task.scratch, &task);
  {
    std::unique_lock lock(chunk.cache().mutex());
    prepare_count(counted);
  }
  bool is_launched = false;
  const AtEnd undo([&] { task.launch_failed = !is_launched; });
  TANDEM_TRY(launch_count(counted, row_lse(chunk) + first * chunk.layer().n_q_heads));
  is_launched = true;
  return {};
}

void LongAppend::prepare_count(Call& tail) const {
  HandOverTask& task = *tail.task;
  clear_visibility(tail.scratch);
  begin_task(tail, &task);
  SequenceCall& of = tail.calls()[0];
  task.shape.n_tokens = task.shape.max_q_len = static_cast<int32_t>(of.q_len);
  (void)set_visibility(tail, of);  // never cancelled
  point_visibility(tail.scratch);
  tail.scratch.host.lay_out(tail.scratch.calls);
  task.touched_alone.push_back({of.sequence->id, of.length, of.foreign_begin});
  prepare_selection(tail);
}

// Launches the count. lse: of the tail's queries.
Status LongAppend::launch_count(Call& tail, const float* lse) const {
  DeviceSession& device = tail.device();
  DeviceSequences sequences;
  TANDEM_TRY(upload_descriptors(tail, &sequences));
  const DeviceAppend append = append_of(tail, sequences);
  TANDEM_TRY(join_side(device, tail.args.stream));
  TANDEM_TRY(launch_append(tail, append));
  device.hand_over().post();
  TANDEM_TRY(call_device(device.device(), &DeviceTable::copy,
                         device.shared().slot(tail.task->ticket) + append.exchange.lse_at, lse,
                         append.n_tokens * tail.layer().n_q_heads * int64_t{4}, tail.args.stream));
  return observe(tail, append, lse);
}

}  // namespace tandem
