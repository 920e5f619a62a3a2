// SPDX-License-Identifier: MIT
// One attend call, from the caller's tensors to the caller's tensors:
//
//   enter      find the sequences, mark them as in flight
//   wait       for the refreshes that the previous call of this layer posted
//   prepare    memory, which keys, where they are: what can fail happens here and changes nothing
//   append     K and V rows, rounded to the storage type, beyond the length: nobody sees them yet
//   pack       queries to f32, grouped by KV head, rotated where the library applies RoPE or stored keys are rotated
//              (what follows, refreshes too, sees no others)
//   attend     window and host part, one state each; merge, with the learned sinks last
//   write      o and lse in the caller's types
//   observe    the finished weights into the moving averages
//   commit     lengths; then settle: evict, post what judges the evicted tokens
//   refresh    after an append: all tokens outside the window are judged anew
//
// A call that is given a flag to cancel it looks at the flag at least every few milliseconds, in every step up to write:
// prepare between pieces of memory, the others between some rows or one tile of keys. After write the call cannot be undone;
// a long refresh is then left to the engine's thread, where the next call that needs it waits for it.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <mutex>

#include "lib/attend_call.h"
#include "lib/convert.h"
#include "lib/hadamard.h"
#include "lib/trace.h"

namespace tandem {

AttendCall::AttendCall(Session& session, const AttendArgs& args, AttendScratch& scratch)
    : session_(session),
      cache_(*session.cache_),
      args_(args),
      layer_(cache_.layers()[static_cast<size_t>(args.layer_idx)]),
      layer_idx_(static_cast<size_t>(args.layer_idx)),
      heads_(session.head_kinds(layer_idx_)),
      outside_(session.outside_layer(layer_idx_)),
      outside_runs_(HeadRuns::retrieval(heads_, layer_)),
      all_runs_(HeadRuns::all(heads_, layer_)),
      policy_(session.layer_policy(layer_idx_)),
      cpu_(cache_.engine().cpu()),
      scratch_(scratch) {}

Status AttendCall::run() {
  if (session_.plan_.is_open)
    return fail(TANDEM_ERROR_INVALID_STATE, "q.device_type", "q is in host memory, and the open step was begun on a stream");
  TANDEM_TRY(args_.watch.check());
  {
    const auto lock = cache_.lock_settled();
    TANDEM_TRY(enter());
  }
  const AtEnd in_flight([this] {
    std::unique_lock lock(cache_.mutex());
    leave();
  });
  TANDEM_TRY(wait_for_refreshes());
  {
    std::unique_lock lock(cache_.mutex());
    TANDEM_TRY(prepare());
  }
  append_rows();
  TANDEM_TRY(args_.watch.check());
  pack_queries();
  TANDEM_TRY(args_.watch.check());
  if (scratch_.host.selects()) {
    std::shared_lock lock(cache_.mutex());
    scratch_.host.choose();
  }
  TANDEM_TRY(scratch_.host.attend(args_.is_watched ? &args_.watch : nullptr));
  TANDEM_TRY(args_.watch.check());  // after this the caller's o and lse change
  write_outputs();
  TANDEM_TRY(args_.watch.check());  // the last time: from here on the call changes what others see
  if (policy_.keeps_maw) scratch_.host.observe();
  {
    std::unique_lock lock(cache_.mutex());
    commit_and_settle();
  }
  // Outside the lock: nobody else may change a sequence that is in flight.
  if (!args_.partial)
    for (const SequenceCall& call : scratch_.calls) call.state->selection->finish(call, args_.watch);
  return {};
}

Status Session::attend(const AttendArgs& args) {
  const auto start = std::chrono::steady_clock::now();
  AttendCall call(*this, args, *scratch_);
  const TraceRange range("call", args.layer_idx, args.on_device ? "on device tensors" : "on host tensors");
  TANDEM_TRY(args.on_device ? call.run_on_device() : call.run());
  ++sums_.n_attends;
  sums_.n_device_attends += args.on_device;
  sums_.attend_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
  return {};
}

void AttendCall::append_rows() {
  if (args_.k == nullptr) return;
  std::shared_lock lock(cache_.mutex());
  for (const SequenceCall& call : scratch_.calls)
    cache_.write_rows(*call.sequence, args_.layer_idx, call.first_query,
                      {args_.k, args_.v, args_.x, call.first_row, call.q_len, args_.watch});
}

// (this->*visit)(row) for every token of the call, on the pool where there is enough to do; none any more when the call has
// been cancelled.
void AttendCall::for_tokens(void (AttendCall::*visit)(int64_t row)) {
  constexpr int64_t kWorthSpreading = 32768;  // elements
  constexpr int64_t kTaskTokens = 16;         // a task that ends at once takes as long to hand out as any other
  struct Visit {
    AttendCall* call;
    void (AttendCall::*visit)(int64_t row);
    int64_t n_tokens, task_tokens;
  };
  const int64_t n_tokens = args_.q.n_tokens, task_tokens = n_tokens < kManyTokens ? 1 : kTaskTokens;
  Visit visits{this, visit, n_tokens, task_tokens};
  const auto task = [](void* context, int64_t task_idx, int32_t) {
    const Visit& of = *static_cast<const Visit*>(context);
    if (of.call->args_.watch.is_cancelled()) return;
    const int64_t end = std::min(of.n_tokens, (task_idx + 1) * of.task_tokens);
    for (int64_t row = task_idx * of.task_tokens; row < end; ++row) (of.call->*of.visit)(row);
  };
  const int64_t n_tasks = (n_tokens + task_tokens - 1) / task_tokens;
  if (n_tokens * layer_.n_q_heads * layer_.k_head_dim >= kWorthSpreading)
    return cpu_.table->run(cpu_.self, n_tasks, task, &visits);
  for (int64_t i = 0; i < n_tasks; ++i) task(&visits, i, 0);
}

namespace {

const SequenceCall& call_of(const AttendScratch& scratch, int64_t row) {
  const auto after = std::upper_bound(scratch.calls.begin(), scratch.calls.end(), row,
                                      [](int64_t wanted, const SequenceCall& call) { return wanted < call.first_row; });
  return *std::prev(after);
}

// Where query head `head` of query t starts in rows of [n_kv_heads][q_len][group_size].
int64_t row_of(const Layer& layer, const SequenceCall& call, int64_t t, int32_t head) {
  return (head / layer.group_size * call.q_len + t) * layer.group_size + head % layer.group_size;
}

}  // namespace

void AttendCall::pack_token(int64_t row) {
  const Layer& layer = layer_;
  const SequenceCall& call = call_of(scratch_, row);
  const int64_t t = row - call.first_row;
  float angles[2 * 320];  // head_dim is at most 576
  if (layer.rope != nullptr) {
    const int64_t position =
        call.visibility.tree_words > 0 ? call.tree_positions[t] : call.sequence->position(call.first_query + t);
    rope_angles(*layer.rope, position, angles);
  }
  for (int32_t h = 0; h < layer.n_q_heads; ++h) {
    float* q = call.q + row_of(layer, call, t, h) * layer.k_head_dim;
    convert_row(cpu_, args_.q.dtype, args_.q.row(row, h), TANDEM_F32, q, layer.k_head_dim);
    if (layer.rope != nullptr) rope_apply(*layer.rope, angles, q);
    if (layer.k_rotation == TANDEM_ROTATION_HADAMARD) hadamard_rotate(q, layer.k_head_dim);
  }
}

void AttendCall::pack_queries() {
  if (!scratch_.calls.empty()) for_tokens(&AttendCall::pack_token);
}

void AttendCall::write_token(int64_t row) {
  const Layer& layer = layer_;
  const AttendArgs& args = args_;
  const SequenceCall& call = call_of(scratch_, row);
  for (int32_t h = 0; h < layer.n_q_heads; ++h) {
    const int64_t at = row_of(layer, call, row - call.first_row, h);
    convert_row(cpu_, TANDEM_F32, call.o + at * layer.v_head_dim, args.o.dtype, args.o.row(row, h), layer.v_head_dim);
    if (args.lse != nullptr) args.lse[row * args.lse_token_stride + h * args.lse_head_stride] = call.lse[at];
  }
}

void AttendCall::write_outputs() {
  if (!scratch_.calls.empty()) for_tokens(&AttendCall::write_token);
}

void AttendCall::commit_and_settle() {
  for (SequenceCall& call : scratch_.calls) {
    if (args_.speculative) {
      guess_tokens(call);
    } else {
      if (args_.k != nullptr) cache_.set_length(*call.sequence, args_.layer_idx, call.length);
      settle(call);
    }
    call.state->selection->committed(call, args_.speculative);
    count_bytes(call);
  }
  session_.sums_.host_kv_bytes_read += scratch_.host.selected_kv_bytes();
}

void AttendCall::guess_tokens(const SequenceCall& call) {
  Sequence& sequence = *call.sequence;
  sequence.speculative[layer_idx_] = call.q_len;
  sequence.speculator = &session_;
  sequence.parents.clear();
  if (args_.parent_idx != nullptr)
    sequence.parents.assign(args_.parent_idx + call.first_row, args_.parent_idx + call.first_row + call.q_len);
}

void AttendCall::settle(SequenceCall& call) {
  LayerState& state = *call.state;
  const int64_t before = state.window_begin;
  session_.evict(state, call.length);
  session_.sums_.evicted_tokens += state.window_begin - before;
}

void AttendCall::count_bytes(const SequenceCall& call) {
  const int64_t key_bytes = plane_bytes(layer_).total();
  const int64_t per_token = key_bytes * outside_.n_kv_heads;
  tandem_session_stats& sums = session_.sums_;
  sums.n_query_tokens += call.q_len;
  sums.resident_kv_bytes_read += (call.length - call.resident_begin) * per_token;
  const int64_t n_found = std::max<int64_t>(0, call.resident_begin - call.first_found());
  sums.host_kv_bytes_read += (call.host_end - call.host_begin + n_found) * per_token;
  sums.dense_kv_bytes += (call.length - call.dense_begin) * key_bytes * layer_.n_kv_heads;
  if (heads_ == nullptr) return;
  const int64_t streaming_bytes = heads_->n_streaming(layer_) * key_bytes;
  sums.resident_kv_bytes_read += (call.length - call.streaming_heads.keys.newest_begin) * streaming_bytes;
  sums.host_kv_bytes_read += call.streaming_heads.keys.sink_end * streaming_bytes;
}

void AttendCall::leave() {
  for (SequenceCall& call : scratch_.calls) {
    if (args_.k != nullptr)
      call.sequence->writer = call.writer_before;
    else
      --call.sequence->n_readers;
    auto& positions = call.sequence->positions;
    if (static_cast<int64_t>(positions.size()) > call.sequence->longest())
      positions.resize(static_cast<size_t>(call.sequence->longest()));
  }
}

}  // namespace tandem
