// SPDX-License-Identifier: MIT
#include "lib/attend/route_plan.h"

#include <algorithm>
#include <mutex>

#include "lib/call/call_plan.h"
#include "lib/routes/prefill_size.h"
#include "lib/routes/prefill_trial.h"
#include "lib/routes/trial.h"

namespace tandem {
namespace {

Status check_lens(std::span<const int64_t> kv_lens, const int64_t* q_lens) {
  for (size_t i = 0; i < kv_lens.size() && q_lens != nullptr; ++i) {
    if (q_lens[i] >= 1 && q_lens[i] <= kv_lens[i]) continue;
    const std::string field = element_name("q_lens", i);
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, field.c_str(), "%s = %lld is not from 1 to %lld, which the sequence has",
                field.c_str(), static_cast<long long>(q_lens[i]), static_cast<long long>(kv_lens[i]));
  }
  return {};
}

// Returns the most queries of a sequence that a ticket has.
int64_t longest_of(const CallsAhead& calls) {
  int64_t longest = 1;
  for (size_t i = 0; i < calls.kv_lens.size(); ++i) longest = std::max(longest, std::min(calls.q_len(i), kMostTicketTokens));
  return longest;
}

// Long appends, whose keys cross the bus once for thousands of queries (lib/attend/long_append.h). Times are sums over
// appends.
struct LongParts {
  int64_t n_keys = 0, resident_tokens = 0;  // resident_tokens: of all calls
  double bus_ns = 0.0, device_ns = 0.0, total_ns = 0.0;
};

// Measures a long append on the device. Without memory for the trial, assumed rates are used.
Status try_long(SessionCore& session, const Layer& layer) {
  Engine& engine = session.cache->engine();
  if (engine.profile().prefill_tile_ns(layer) > 0.0) return {};
  double tile_ns = 0.0;
  Status status = try_prefill(*engine.device(), session.cache->device_tier(), layer, &tile_ns);
  if (status.ok()) {
    engine.profile().note_prefill_trial(layer, tile_ns);
    return {};
  }
  if (!is_for_lack_of_memory(status)) return status;
  engine.log(TANDEM_LOG_WARNING,
             "plans of long appends go by what they take on an H200, as there is no memory for a trial: %s",
             status.info().message.c_str());
  return {};
}

// Plans the last chunk of an append of q_len queries, if that chunk is a long one. *n: gets the chunk's tokens.
Status plan_long(SessionCore& session, size_t layer_idx, int64_t kv_len, int64_t q_len, int64_t* n, LongParts* parts) {
  const Layer& layer = session.layers[layer_idx].layer;
  const Layer& outside_heads = session.layers[layer_idx].outside;
  Profile& profile = session.cache->engine().profile();
  const int64_t page_len = session.cache->page_len();
  const int64_t key_bytes = token_kv_bytes(outside_heads);
  PrefillSize size;
  const PrefillTerms terms = prefill_terms(session.terms(), layer_idx);
  const KeysOfAppend all = keys_of_append(session.options, page_len, planned_sequence(layer, kv_len, q_len));
  TANDEM_TRY(size_prefill(layer, terms, q_len, all, &size));
  *n = (q_len - 1) % size.n_tokens + 1;
  if (*n <= kMostTicketTokens) return {};
  const TokenRange keys = outside_of(session.options, page_len, planned_sequence(layer, kv_len, *n), kv_len - *n);
  const int64_t n_keys = keys.end - keys.begin;
  parts->resident_tokens += kv_len - keys.end;
  if (n_keys == 0) return {};
  TANDEM_TRY(try_long(session, layer));
  const double bus_ns = profile.stream_ns(n_keys * key_bytes);
  const double known_ns = profile.prefill_tile_ns(layer);
  const double device_ns = prefill_ns(outside_heads, size.layout, *n, n_keys, terms.n_multiprocessors,
                                      known_ns > 0.0 ? known_ns : assumed_tile_ns(layer));
  parts->n_keys += n_keys;
  parts->bus_ns += bus_ns;
  parts->device_ns += device_ns;
  parts->total_ns += std::max(bus_ns, device_ns);
  return {};
}

// may_stream: the session can stream keys of this layer. Long appends that stream are not in *split.
Status plan_calls(SessionCore& session, const CallsAhead& calls, bool may_stream, CallPlan* split, LongParts* parts) {
  const Profile& profile = session.cache->engine().profile();
  const Layer& layer = session.layers[calls.layer_idx].outside;
  const RouteOptions& routes = session.routes;
  const int64_t key_bytes = token_kv_bytes(layer);
  const RebuildTerms rebuild = session.rebuild_terms(calls.layer_idx, may_stream);
  const BusAhead ahead = session.bus_ahead(calls.layer_idx, longest_of(calls));
  const bool is_auto = routes.is_auto();
  bool streams_long = may_stream && !session.refuses_long && routes.asks_for(kPlanStream) && !routes.has_share;
  for (int round = 0;; ++round) {
    int64_t n_outside = 0;
    split->clear(ahead);
    *parts = {};
    for (size_t i = 0; i < calls.kv_lens.size(); ++i) {
      const int64_t kv_len = calls.kv_lens[i], q_len = calls.q_len(i);
      int64_t n = std::min(q_len, kMostTicketTokens);
      if (kv_len < n) continue;
      if (streams_long && q_len > kMostTicketTokens)
        TANDEM_TRY(plan_long(session, calls.layer_idx, kv_len, q_len, &n, parts));
      if (n > kMostTicketTokens) continue;
      const TokenRange keys =
          outside_of(session.options, session.cache->page_len(), planned_sequence(layer, kv_len, n), kv_len - n);
      split->add(i, n, keys.begin, keys.end);
      n_outside += keys.end - keys.begin;
      parts->resident_tokens += kv_len - keys.end;
    }
    if (may_stream && is_auto && is_worth_planning(n_outside * key_bytes))
      split->make(profile, layer, key_bytes, rebuild);
    else
      split->give(profile, layer, key_bytes, may_stream && routes.is_given() ? routes.moved_share : 0.0, rebuild);
    if (round > 0 || !is_auto || session.refuses_long || split->n_streamed() == 0) return {};
    streams_long = true;  // tickets of long appends would stream, so their long chunks do
  }
}

void fill_plan(const Layer& layer, const CallPlan& split, const LongParts& parts, tandem_route_plan* plan) {
  const int64_t key_bytes = token_kv_bytes(layer);
  const auto ns = [](double x) { return static_cast<int64_t>(x); };
  const RoutePlan& times = split.plan();
  int64_t n_outside = 0;
  for (const PlannedKeys& keys : split.keys()) n_outside += keys.end - keys.begin;
  plan->resident_tokens = parts.resident_tokens;
  plan->recompute_tokens = split.n_rebuilt();
  plan->stream_tokens = split.n_streamed() - plan->recompute_tokens + parts.n_keys;
  plan->host_tokens = n_outside - split.n_streamed();
  plan->host_bytes = plan->host_tokens * key_bytes;
  plan->stream_bytes = plan->stream_tokens * key_bytes;
  plan->recompute_bytes = plan->recompute_tokens * layer.x_bytes();
  plan->host_ns = ns(times.host_ns);
  plan->bus_ns = ns(times.bus_ns + parts.bus_ns);
  plan->device_ns = ns(times.device_ns + parts.device_ns);
  plan->total_ns = ns(times.total_ns + parts.total_ns);
  if (parts.n_keys > 0) return;
  plan->host_alone_ns = ns(split.predict_ns(0.0));
  plan->stream_alone_ns = ns(split.predict_ns(1.0));
  plan->recompute_alone_ns = ns(split.predict_rebuilt_ns());
}

}  // namespace

Status plan_route(SessionCore& session, const CallsAhead& calls, tandem_route_plan* plan) {
  Engine& engine = session.cache->engine();
  const SessionLayer& of = session.layers[calls.layer_idx];
  const Layer& layer = of.outside;
  TANDEM_TRY(check_lens(calls.kv_lens, calls.q_lens));
  if (engine.device() == nullptr)
    return fail(TANDEM_ERROR_UNSUPPORTED, "session", "session: the engine has no device, there is one route");
  if (!can_stream(of.policy, false))
    return fail(TANDEM_ERROR_UNSUPPORTED, "session", "session: policy \"%s\" chooses keys of layer %zu when a call is made",
                of.policy.name, calls.layer_idx);
  if (layer.n_kv_heads == 0)
    return fail(TANDEM_ERROR_UNSUPPORTED, "layer_idx", "layer_idx = %zu: all of its heads stream, there is nothing to plan",
                calls.layer_idx);
  const int64_t longest = longest_of(calls);
  const bool may_stream = !layouts_of(session.key_routes).empty() && layer.rope == nullptr && !session.refuses_streams;
  if (session.device != nullptr) session.hand_over().drain();
  TANDEM_TRY(try_routes(engine, session.cache->device_tier(), layer, longest, session.routes.buffer_bytes));
  if (may_stream) {
    const std::unique_lock lock(session.cache->mutex());
    for (const auto& route : session.key_routes)
      if (route != nullptr) TANDEM_TRY(route->try_out(*session.cache, session.device.get(), calls.layer_idx));
  }
  CallPlan split;
  LongParts parts;
  TANDEM_TRY(plan_calls(session, calls, may_stream, &split, &parts));
  fill_plan(layer, split, parts, plan);
  return {};
}

}  // namespace tandem
