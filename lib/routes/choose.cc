// SPDX-License-Identifier: MIT
// Which route the keys outside the window take, call by call:
//
//   reserve    two buffers, room for a piece's states; the store pinned as far as it will be read; for "auto", what bus and
//              CPU take is measured where the engine does not know it yet
//   choose     of a chunk: the stream or the CPU
#include <algorithm>
#include <chrono>

#include "lib/attend_call.h"
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
  size->n_pieces = n_pieces;
  size->n_stream_pages = layout.n_pages;
  return {};
}

Status AttendCall::give_streams_up(Status status) {
  session_.may_stream_ = false;
  if (session_.routes_.route == Route::kStream || !is_for_lack_of_memory(status)) return status;
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
  task->streamed = nullptr;
  task->streamed_kv_bytes = task->part_keys = 0;
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
  const bool is_worth_it = session_.routes_.route == Route::kStream || costs.stream_ns(bytes) < host_ns;
  if (n_tokens == 0 || !session_.may_stream_ || !is_worth_it) {
    task->layer = &layer_;
    task->part_queries = most_queries;
    task->part_keys = bytes < kLeastBytes ? 0 : static_cast<int64_t>(key_queries / static_cast<double>(most_queries));
    return;
  }
  for (size_t i = 0; i < scratch_.calls.size(); ++i) {
    SequenceCall& call = scratch_.calls[i];
    call.streams = call.has_host;
    if (call.streams) cut_pieces(layout, layer_.n_kv_heads, i, {call.host_begin, call.host_end}, &task->pieces);
  }
  task->bases = cache_.store().bases();
  task->streamed_kv_bytes = bytes;
  task->streamed = session_.device_->streamed(task->idx);
  std::atomic_ref(*task->streamed).store(0, std::memory_order_relaxed);
}

}  // namespace tandem
