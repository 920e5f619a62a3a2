// SPDX-License-Identifier: MIT
// The route "stream" (HeadInfer): keys outside the window cross the bus in pieces and are attended on the device.
//
//   reserve    two buffers, room for a piece's states; the store pinned as far as it will be read; for "auto", what bus and
//              CPU take is measured where the engine does not know it yet
//   choose     of a chunk: this route or the CPU; what is streamed, cut into pieces (lib/routes/stream_pieces.h)
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
namespace {

constexpr int64_t kLeastBytes = int64_t{4} << 20;  // of a call, for "auto" to look at the costs

bool is_for_lack_of_memory(const Status& status) {
  return status.code() == TANDEM_ERROR_OUT_OF_MEMORY || status.code() == TANDEM_ERROR_CAPACITY;
}

}  // namespace

// What the last part of a call may find outside its window, where each has up to `most` queries of a sequence.
TokenRange AttendCall::streamed_tokens(const SequenceCall& call, int64_t most) const {
  const bool is_whole = call.q_len <= most && args_.q.n_tokens <= DeviceSession::kMostTokens;
  const int64_t end = session_.evicted_to(*call.state, is_whole ? call.first_query : call.length - 1);
  int64_t begin = 0;
  if (layer_.sliding_window > 0)
    begin = cache_.first_within(*call.sequence, call.sequence->position(call.first_query), layer_.sliding_window);
  return {std::min(begin, end), end};
}

// size: gets what streaming takes, if anything will be streamed. Memory that "auto" cannot have leaves it with the CPU.
Status AttendCall::reserve_stream(int64_t most, CallSize* size) {
  session_.may_stream_ = false;
  const Route route = session_.routes_.route;
  if (route == Route::kHost || session_.stream_layouts_.empty() || !can_stream(policy_)) return {};
  if (layer_.rope != nullptr || args_.speculative)
    return {};  // the store has keys as they were before; a guess is the host's
  const StreamLayout& layout = session_.stream_layouts_[layer_idx_];
  int64_t n_tokens = 0, n_pieces = 0;
  for (const SequenceCall& call : scratch_.calls) {
    const TokenRange tokens = streamed_tokens(call, most);
    n_tokens += tokens.end - tokens.begin;
    n_pieces += count_pieces(layout, layer_.n_kv_heads, tokens.begin, tokens.end);
  }
  if (n_tokens == 0) return {};
  const int64_t bytes = n_tokens * layer_.n_kv_heads * layout.row_bytes.total();
  if (route == Route::kAuto && (bytes < kLeastBytes || session_.refuses_streams_)) return {};
  if (route == Route::kAuto) {
    bool is_worth_it = false;
    if (Status status = compare_routes(most, n_tokens, bytes, &is_worth_it); !status.ok())
      return give_streams_up(std::move(status));
    if (!is_worth_it) return {};
  }
  const bool streams_keys = session_.routes_.streams_keys();
  if (streams_keys)
    if (Status status = session_.device_->reserve_stream(session_.routes_.buffer_bytes); !status.ok())
      return give_streams_up(std::move(status));
  bool is_pinned = true;
  for (const SequenceCall& call : scratch_.calls)
    is_pinned = cache_.pin(*call.sequence, streamed_tokens(call, most).end) && is_pinned;
  if (route == Route::kAuto && !is_pinned) {
    session_.refuses_streams_ = true;
    cache_.engine().log(TANDEM_LOG_WARNING, "the device refuses to pin the host store: the CPU attends all of it");
    return {};
  }
  session_.may_stream_ = true;
  size->n_pieces = streams_keys ? n_pieces : 0;
  size->n_stream_pages = streams_keys ? layout.n_pages : 0;
  return {};
}

Status AttendCall::give_streams_up(Status status) {
  session_.may_stream_ = false;
  if (session_.routes_.is_by_device() || !is_for_lack_of_memory(status)) return status;
  session_.refuses_streams_ = true;
  cache_.engine().log(TANDEM_LOG_WARNING,
                      "the CPU attends all keys outside the window, as there is no memory to stream them: %s",
                      status.info().message.c_str());
  return {};
}

// Whether parts of up to `most` queries take less time on the device, or nobody knows yet: then the CPU's first part tells.
Status AttendCall::compare_routes(int64_t most, int64_t n_tokens, int64_t bytes, bool* is_worth_it) {
  RouteCosts& costs = cache_.engine().route_costs();
  int64_t longest = 0;
  for (const SequenceCall& call : scratch_.calls) longest = std::max(longest, std::min(most, call.q_len));
  TANDEM_TRY(measure_routes(most));
  const double host_ns = costs.host_ns(layer_, longest, n_tokens);
  *is_worth_it = host_ns == 0.0 || costs.stream_ns(bytes) < host_ns;
  return {};
}

// What the engine does not know yet: once for a shape of heads and a power of two of queries.
Status AttendCall::measure_routes(int64_t most) {
  RouteCosts& costs = cache_.engine().route_costs();
  if (!costs.knows_bus()) {
    std::unique_ptr<StreamBuffers> trial;
    double rate = 0.0;
    TANDEM_TRY(
        StreamBuffers::create(session_.device_->device(), cache_.device_tier(), session_.routes_.buffer_bytes, &trial));
    TANDEM_TRY(trial->measure(&rate));
    costs.note_bus(rate);
  }
  const SequenceCall* largest = nullptr;
  for (const SequenceCall& call : scratch_.calls)
    if (largest == nullptr || streamed_tokens(call, most).end > streamed_tokens(*largest, most).end) largest = &call;
  const int64_t n_queries = std::min(most, largest->q_len);
  if (costs.knows_host(layer_, n_queries)) return {};
  const TokenRange tokens = streamed_tokens(*largest, most);
  const int64_t stored = std::min(tokens.end, largest->sequence->lengths[layer_idx_]);
  if (stored <= tokens.begin) return {};  // they are still to come
  session_.device_->hand_over().drain();
  return measure_host(*largest, n_queries, {tokens.begin, stored});
}

// Zero queries over keys that are there: first a few, for what is done once, then as many as take about a millisecond.
Status AttendCall::measure_host(const SequenceCall& call, int64_t n_queries, TokenRange tokens) {
  constexpr int64_t kWarmKeys = 256, kLeastKeys = 2048, kMostKeys = 16384, kWork = int64_t{1} << 20;
  const int64_t n_keys = std::clamp(kWork / n_queries, kLeastKeys, kMostKeys);
  const TokenRange parts[] = {{std::max(tokens.begin, tokens.end - kWarmKeys), tokens.end},
                              {tokens.begin, std::min(tokens.end, tokens.begin + n_keys)}};
  const int64_t rows = n_queries * layer_.group_size;
  std::vector<float> q(static_cast<size_t>(rows * layer_.k_head_dim), 0.0f);
  std::vector<float> o(static_cast<size_t>(layer_.n_kv_heads * rows * layer_.v_head_dim));
  std::vector<float> lse(static_cast<size_t>(layer_.n_kv_heads * rows));
  for (const TokenRange& part : parts) {
    clear_scratch();
    find_spans(call, part.begin, part.end, &scratch_.spans);
    for (int32_t h = 0; h < layer_.n_kv_heads; ++h) {
      scratch_.job_runs.push_back(scratch_.runs.size());
      add_runs(call, scratch_.spans, h);
      AttendJob& job = scratch_.jobs.emplace_back(plain_job(call, h));
      job.n_rows = static_cast<int32_t>(rows);
      job.q = q.data();
      job.o = o.data() + h * rows * layer_.v_head_dim;
      job.lse = lse.data() + h * rows;
    }
    scratch_.job_runs.push_back(scratch_.runs.size());
    for (size_t j = 0; j < scratch_.jobs.size(); ++j) finish_runs(j);
    const auto begin = std::chrono::steady_clock::now();
    TANDEM_TRY(cpu_.table->attend(cpu_.self, scratch_.jobs.data(), static_cast<int32_t>(scratch_.jobs.size())));
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
    if (&part == &parts[1])
      cache_.engine().route_costs().note_trial(layer_, n_queries, part.end - part.begin, spent.count());
  }
  return {};
}

// Calls with keys outside the window: all of a chunk take one route.
void AttendCall::choose_route(HandOverTask* task) {
  task->pieces.clear();
  task->rebuilt.clear();
  task->streamed = task->sent_hidden = nullptr;
  task->streamed_x_bytes = task->streamed_kv_bytes = task->part_keys = 0;
  if (!can_stream(policy_) || session_.stream_layouts_.empty()) return;
  const StreamLayout& layout = session_.stream_layouts_[layer_idx_];
  const RouteCosts& costs = cache_.engine().route_costs();
  int64_t n_tokens = 0, most_queries = 1;
  double host_ns = 0.0, key_queries = 0.0;
  for (const SequenceCall& call : scratch_.calls) {
    if (!call.has_host) continue;
    const int64_t n = call.host_end - call.host_begin;
    n_tokens += n;
    most_queries = std::max(most_queries, call.q_len);
    key_queries += static_cast<double>(n * call.q_len);
    host_ns += costs.host_ns(layer_, call.q_len, n);
  }
  const int64_t bytes = n_tokens * layer_.n_kv_heads * layout.row_bytes.total();
  const bool is_worth_it = session_.routes_.is_by_device() || costs.stream_ns(bytes) < host_ns;
  if (n_tokens == 0 || !session_.may_stream_ || !is_worth_it) {
    task->layer = &layer_;
    task->part_queries = most_queries;
    task->part_keys = bytes < kLeastBytes ? 0 : static_cast<int64_t>(key_queries / static_cast<double>(most_queries));
    return;
  }
  const int64_t n_rebuilt = choose_rebuilt(task);
  for (size_t i = 0; i < scratch_.calls.size(); ++i) {
    SequenceCall& call = scratch_.calls[i];
    call.streams = call.has_host;
    const int64_t begin = std::max(call.host_begin, call.rebuilt_end);
    if (call.streams) cut_pieces(layout, layer_.n_kv_heads, i, {begin, call.host_end}, &task->pieces);
  }
  task->bases = cache_.store().bases();
  task->streamed_kv_bytes = bytes - n_rebuilt * layer_.n_kv_heads * layout.row_bytes.total();
  if (task->pieces.empty()) return;
  task->streamed = session_.device_->streamed(task->idx);
  std::atomic_ref(*task->streamed).store(0, std::memory_order_relaxed);
}

void AttendCall::wait_for_streamed_rows() {
  for (const SequenceCall& call : scratch_.calls)
    if (call.streams) session_.device_->hand_over().wait_for_rows(call.sequence->id, args_.layer_idx, call.host_end);
}

// Behind the descriptors of the calls: one for each piece, and the page table that serves all of them.
void AttendCall::describe_pieces(const HandOverTask& task, DeviceSequence* to, int64_t* table) const {
  const StreamLayout& layout = session_.stream_layouts_[layer_idx_];
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
  const StreamLayout& layout = session_.stream_layouts_[layer_idx_];
  StreamBuffers& buffers = *session_.device_->stream();
  CopyList copies;
  std::byte* const buffer = buffers.next();
  scratch_.spans.clear();
  cache_.spans(*scratch_.calls[piece.call].sequence, piece.begin, piece.end, &scratch_.spans);
  for (const PageSpan& span : scratch_.spans) {
    copies.cut();
    for (int64_t t = span.token_idx; t < span.token_idx + span.n_tokens;) {
      const int64_t slot = t % layout.page_len;
      const int64_t n = std::min(layout.page_len - slot, span.token_idx + span.n_tokens - t);
      std::byte* const page = buffer + t / layout.page_len % layout.n_pages * layout.page_bytes;
      for (int32_t p = 0; p < kPlanes; ++p)
        for (int32_t h = 0; h < piece.n_heads && layout.row_bytes.of[p] > 0; ++h) {
          const Rows rows = cache_.store().rows(task.bases, span.page, span.slot + t - span.token_idx, args_.layer_idx,
                                                piece.first_head + h);
          copies.add(page + layout.at[p] + h * layout.head_stride[p] + slot * layout.row_bytes.of[p], rows.of[p],
                     n * layout.row_bytes.of[p]);
        }
      t += n;
    }
  }
  return buffers.send(copies.copies());
}

// The first pieces are under way before anything else of the call.
Status AttendCall::begin_stream(HandOverTask* task) {
  if (task->pieces.empty()) return {};
  if (task->rebuilt.empty()) task->sent = std::chrono::steady_clock::now();
  const size_t n = std::min(task->pieces.size(), static_cast<size_t>(StreamBuffers::kBuffers));
  for (size_t i = 0; i < n; ++i) TANDEM_TRY(send_piece(*task, task->pieces[i]));
  return mark_stream(*task, n);
}

Status AttendCall::mark_stream(const HandOverTask& task, size_t n_sent) {
  if (n_sent < task.pieces.size()) return {};
  return session_.device_->stream()->mark(session_.device_->streamed_on_device(task.idx));
}

// call: as that of the window, whose states are where these go.
Status AttendCall::attend_piece(const DeviceAttend& window, const StreamPiece& piece, const std::byte* buffer,
                                const DeviceSequence* described) {
  DeviceSession& device = *session_.device_;
  const StreamLayout& layout = session_.stream_layouts_[layer_idx_];
  const int64_t first_head = int64_t{piece.first_head} * layer_.group_size;
  Layer layer = *window.layer;
  layer.n_kv_heads = piece.n_heads;
  layer.n_q_heads = piece.n_heads * layer.group_size;
  layer.sinks = nullptr;
  DeviceAttend attend = window;
  attend.layer = &layer;
  attend.pages = {};
  attend.pages.page_len = layout.page_len;
  for (int32_t p = 0; p < kPlanes; ++p) {
    attend.pages.head_stride[p] = layout.head_stride[p];
    if (layout.row_bytes.of[p] > 0) attend.pages.planes[p] = const_cast<std::byte*>(buffer) + layout.at[p];
  }
  attend.sequences.sequences = described;
  attend.sequences.n_sequences = 1;
  attend.sequences.max_keys = piece.end - piece.begin;
  attend.q.data = static_cast<std::byte*>(attend.q.data) + first_head * attend.q.head_stride * row_bytes(attend.q.dtype, 1);
  attend.o.data = device.part_o() + first_head * layer.v_head_dim;
  attend.lse = device.part_lse() + first_head;
  return call_device(device.device(), &DeviceTable::attend, &attend, args_.stream);
}

// window: the call that has left its states in the session's o() and lse(). described: of the first piece.
Status AttendCall::attend_stream(const DeviceAttend& window, const HandOverTask& task) {
  DeviceSession& device = *session_.device_;
  StreamBuffers& buffers = *device.stream();
  DeviceAttend attend = window;
  const auto* described = reinterpret_cast<const DeviceSequence*>(device.descriptors() + task.pieces_at);
  attend.sequences.page_tables = reinterpret_cast<const int64_t*>(described + task.pieces.size());
  size_t n_sent = std::min(task.pieces.size(), static_cast<size_t>(StreamBuffers::kBuffers));
  for (const StreamPiece& piece : task.pieces) {
    const SequenceCall& call = scratch_.calls[piece.call];
    std::byte* buffer = nullptr;
    TANDEM_TRY(buffers.take(args_.stream, &buffer));
    TANDEM_TRY(attend_piece(attend, piece, buffer, described++));
    TANDEM_TRY(buffers.done_with(args_.stream));
    DeviceAccumulate sum;
    sum.layer = window.layer;
    sum.first_row = static_cast<int32_t>(call.first_row);
    sum.n_rows = static_cast<int32_t>(call.q_len);
    sum.first_head = piece.first_head * layer_.group_size;
    sum.n_heads = piece.n_heads * layer_.group_size;
    sum.o = device.o();
    sum.lse = device.lse();
    sum.part_o = device.part_o();
    sum.part_lse = device.part_lse();
    TANDEM_TRY(call_device(device.device(), &DeviceTable::accumulate, &sum, args_.stream));
    if (n_sent == task.pieces.size()) continue;
    TANDEM_TRY(send_piece(task, task.pieces[n_sent++]));
    TANDEM_TRY(mark_stream(task, n_sent));
  }
  return {};
}

}  // namespace tandem
