// SPDX-License-Identifier: MIT
// Which route the keys outside the window take, call by call:
//
//   reserve    two buffers, room for a piece's states; for "auto", what bus and CPU take is measured where the engine does
//              not know it yet
//   choose     of a chunk: which keys cross the bus, by the planner (lib/routes/planner.h) or as the session was told; the
//              store pinned as far as these reach; with "recompute", which of them cross it as hidden states
//
// Of a sequence, tokens [host_begin, cpu_begin) cross the bus and [cpu_begin, host_end) are the CPU's, at the same time. The
// older ones go: the store has them for long, and what is pinned stays what is sent as sequences grow.
#include <algorithm>

#include "lib/attend_call.h"
#include "lib/routes/routes_taken.h"
#include "lib/routes/trial.h"

namespace tandem {

// The store has keys as they were before they are rotated; a guess is the host's.
RoutesTaken possible_routes(const SizeTerms& terms, const CallShape& shape) {
  const Layer& layer = *shape.layer;
  const Layer& outside = retrieval_layer(terms.kinds(shape.layer_idx), layer);
  if (terms.streams.empty() || layer.rope != nullptr || shape.is_speculative || outside.n_kv_heads == 0) return {};
  int64_t n_tokens = 0, longest = 0;
  for (const SequenceShape& sequence : shape.sequences) {
    const TokenRange tokens = terms.streamed(shape, sequence);
    n_tokens += tokens.end - tokens.begin;
    longest = std::max(longest, tokens.end - tokens.begin);
  }
  if (n_tokens == 0) return {};
  if (!terms.routes.always_streams() && !is_worth_planning(n_tokens * token_kv_bytes(outside))) return {};
  RoutesTaken taken;
  taken.streams = true;
  taken.rebuilds = !terms.rebuilt.empty();
  taken.layout = shorten_pages(layer, terms.streams[shape.layer_idx], longest);
  return taken;
}

// Buffers for the routes of the call. Memory that "auto" cannot have leaves the keys with the CPU.
Status AttendCall::take_routes(const CallShape& shape) {
  const SizeTerms terms = session_.terms();
  const RoutesTaken possible = possible_routes(terms, shape);
  taken_ = {};
  if (!possible.streams) return {};
  if (session_.routes_.route == Route::kAuto) {
    if (session_.refuses_streams_) return {};
    const int64_t longest = std::min(shape.most_queries, shape.max_q_len());
    if (Status status = try_unknown_routes(longest); !status.ok()) return give_streams_up(std::move(status));
    TANDEM_TRY(session_.try_rebuild(layer_idx_));
    CallPlan& plan = scratch_.plan;
    plan.clear(session_.bus_ahead(layer_idx_, longest));
    for (size_t i = 0; i < shape.sequences.size(); ++i) {
      const TokenRange tokens = terms.streamed(shape, shape.sequences[i]);
      plan.add(i, std::min(shape.most_queries, shape.sequences[i].q_len), tokens.begin, tokens.end);
    }
    plan.make(cache_.engine().profile(), outside_, token_kv_bytes(outside_), session_.rebuild_terms(layer_idx_, true));
    if (plan.n_streamed() == 0) return {};
  }
  if (session_.routes_.streams_keys())
    if (Status status = session_.device_->reserve_stream(session_.routes_.buffer_bytes); !status.ok())
      return give_streams_up(std::move(status));
  taken_ = possible;
  return take_rebuilds(shape);
}

Status AttendCall::give_streams_up(Status status) {
  taken_ = {};
  if (session_.routes_.route != Route::kAuto || !is_for_lack_of_memory(status)) return status;
  session_.refuses_streams_ = true;
  cache_.engine().log(TANDEM_LOG_WARNING,
                      "the CPU attends all keys outside the window, as there is no memory to stream them: %s",
                      status.info().message.c_str());
  return {};
}

// What the engine does not know yet: once for a shape of heads and a power of two of queries. longest: of a sequence.
Status AttendCall::try_unknown_routes(int64_t longest) {
  Engine& engine = cache_.engine();
  if (engine.profile().knows_bus() && engine.profile().knows_host(outside_, longest)) return {};
  session_.device_->hand_over().drain();
  return try_routes(engine, cache_.device_tier(), outside_, longest, session_.routes_.buffer_bytes);
}

// Calls with keys outside the window. task: as begin_task() leaves it.
void AttendCall::choose_route(HandOverTask* task) {
  CallPlan& plan = scratch_.plan;
  plan.clear(session_.bus_ahead(layer_idx_, task->shape.max_q_len));
  for (size_t i = 0; i < scratch_.calls.size(); ++i) {
    const SequenceCall& call = scratch_.calls[i];
    if (call.host_end > call.host_begin && can_stream(policy_, call.q_len > 1))
      plan.add(i, call.q_len, call.host_begin, call.host_end);
  }
  describe_part(task);
  if (plan.keys().empty() || session_.stream_layouts_.empty()) return;
  const RouteOptions& routes = session_.routes_;
  const Profile& profile = cache_.engine().profile();
  const bool plans = taken_.streams && routes.route == Route::kAuto;
  const RebuildTerms rebuild = session_.rebuild_terms(layer_idx_, taken_.rebuilds);
  if (plans)
    plan.make(profile, outside_, token_kv_bytes(outside_), rebuild);
  else
    plan.give(profile, outside_, token_kv_bytes(outside_), taken_.streams ? routes.given_share() : 0.0, rebuild);
  if (!pin_streamed()) plan.give(profile, outside_, token_kv_bytes(outside_), 0.0);
  for (const PlannedKeys& keys : plan.keys()) {
    scratch_.calls[keys.call].cpu_begin = keys.cpu_begin;
    scratch_.calls[keys.call].rebuilt_end = keys.rebuilt_end;
  }
  describe_part(task);
  task->part.keeps_hidden = plans && plan.n_rebuilt() == 0 && session_.rebuild_terms(layer_idx_, true).may;
  if (task->part.streamed_tokens == 0) return;
  task->part.streamed_tokens -= choose_rebuilt(task);
  if (!task->rebuilt.empty() && !plan.is_rebuilt_by_bus()) task->part.bus_tells = false;  // the device makes keys
  for (size_t i = 0; i < scratch_.calls.size(); ++i) {
    const SequenceCall& call = scratch_.calls[i];
    if (call.streams())
      cut_pieces(taken_.layout, outside_runs_.get(), i, {std::max(call.host_begin, call.rebuilt_end), call.cpu_begin},
                 &task->pieces);
  }
  if (!task->rebuilt.empty())  // hidden states have buffers of their own
    task->part.ahead_bytes =
        profile.as_keys(outside_, rebuild.ahead_keys * outside_.x_bytes()) + (task->pieces.empty() ? 0 : plan.ahead().bytes);
  task->bases = cache_.store().bases();
  if (task->pieces.empty()) return;
  task->streamed = session_.device_->streamed(task->idx);
  std::atomic_ref(*task->streamed).store(0, std::memory_order_relaxed);
}

// What "auto" streams may become more with the next calls: an eighth is pinned in advance.
bool AttendCall::pin_streamed() {
  bool is_pinned = true;
  for (const PlannedKeys& keys : scratch_.plan.keys()) {
    if (keys.cpu_begin == keys.begin) continue;
    const int64_t ahead = session_.routes_.route == Route::kAuto ? (keys.cpu_begin - keys.begin) / 8 : 0;
    is_pinned = cache_.pin(*scratch_.calls[keys.call].sequence, std::min(keys.cpu_begin + ahead, keys.end)) && is_pinned;
  }
  return accept_pins(is_pinned);
}

// false: "auto" is to leave it.
bool AttendCall::accept_pins(bool is_pinned) {
  if (is_pinned || session_.routes_.route != Route::kAuto) return true;
  session_.refuses_streams_ = true;
  taken_ = {};
  cache_.engine().log(TANDEM_LOG_WARNING, "the device refuses to pin the host store: the CPU attends all of it");
  return false;
}

// As many bytes as pieces may have in the two buffers.
BusAhead Session::bus_ahead(size_t layer_idx, int64_t n_queries) const {
  if (device_ == nullptr || stream_layouts_.empty()) return {};
  const StreamLayout& layout = stream_layouts_[layer_idx];
  return {device_->hand_over().bus_ahead_ns(static_cast<int32_t>(layer_idx), n_queries),
          StreamBuffers::kBuffers * layout.n_pages * layout.page_bytes};
}

// What is to be learned of it. Small parts say nothing.
void AttendCall::describe_part(HandOverTask* task) const {
  HandOverPart& part = task->part;
  part = {};
  double key_queries = 0.0;
  part.n_queries = 1;
  for (const PlannedKeys& keys : scratch_.plan.keys()) {
    part.streamed_tokens += keys.cpu_begin - keys.begin;
    part.host_tokens += keys.end - keys.cpu_begin;
    part.n_queries = std::max(part.n_queries, keys.n_queries);
    key_queries += static_cast<double>((keys.end - keys.cpu_begin) * keys.n_queries);
  }
  if (session_.stream_layouts_.empty()) return;
  part.layer = &outside_;
  part.key_bytes = token_kv_bytes(outside_);
  if (!is_worth_planning((part.streamed_tokens + part.host_tokens) * part.key_bytes)) return;
  part.weighed_keys = static_cast<int64_t>(key_queries / static_cast<double>(part.n_queries));
  // Beside streamed keys alone, the CPU's sinks of streaming heads would be taken for a part of the others. Where weights
  // are counted, the CPU does more than attend.
  part.tells =
      !session_.device_->device().bus->has_weights() && (heads_ == nullptr || part.host_tokens > 0) && !policy_.keeps_maw;
  part.ahead_bytes = scratch_.plan.ahead().bytes;
  const RoutePlan& plan = scratch_.plan.plan();
  part.predicted_ns = plan.total_ns > 0.0 ? std::max(1.0, plan.seen_ns) : 0.0;
}

}  // namespace tandem
