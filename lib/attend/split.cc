// SPDX-License-Identifier: MIT
#include "lib/attend/split.h"

#include <algorithm>

#include "lib/routes/trial.h"

namespace tandem {

// Routes take no keys that the library rotates, as the store has them unrotated. The host attends speculative tokens. The
// host also attends named keys, except those of long appends.
RoutesTaken possible_routes(const SizeTerms& terms, const CallShape& shape) {
  const Layer& layer = *shape.layer;
  const Layer& outside = retrieval_layer(terms.kinds(shape.layer_idx), layer);
  if (terms.layouts.empty() || layer.rope != nullptr || shape.is_speculative || outside.n_kv_heads == 0) return {};
  if (shape.idx_heads > 0 && !(shape.may_be_long && terms.routes.appends_at_once())) return {};
  int64_t n_tokens = 0, longest = 0;
  for (const SequenceShape& sequence : shape.sequences) {
    const TokenRange tokens = terms.streamed(shape, sequence);
    n_tokens += tokens.end - tokens.begin;
    longest = std::max(longest, tokens.end - tokens.begin);
  }
  if (n_tokens == 0) return {};
  if (!terms.routes.is_given() && !is_worth_planning(n_tokens * token_kv_bytes(outside))) return {};
  RoutesTaken taken;
  for (size_t r = 0; r < kMostRoutes; ++r)
    taken.uses[r] = terms.key_routes[r] != nullptr && terms.routes.may_take(r) && (shape.idx_heads == 0 || r == kPlanStream);
  taken.layout = shorten_pages(layer, terms.layouts[shape.layer_idx], longest);
  return taken;
}

namespace {

// Measures rates that the engine does not know: once for each shape of heads and power of two of queries. longest: the most
// queries of a sequence.
Status try_unknown_routes(const Call& call, int64_t longest) {
  Engine& engine = call.cache().engine();
  const Layer& outside = call.facts.outside;
  if (!engine.profile().knows_bus() || !engine.profile().knows_host(outside, longest)) {
    call.session.hand_over().drain();
    TANDEM_TRY(try_routes(engine, call.cache().device_tier(), outside, longest, call.session.routes.buffer_bytes));
  }
  return {};
}

// Returns whether single queries have to fill a window, as the first tokens do. The CPU then attends all keys, and the next
// call makes the trials.
bool is_first(const Call& call, const CallShape& shape) {
  const auto lacks_rows = [&](const SequenceCall& of) {
    const TokenRange valid = of.window->valid(call.facts.idx);
    return valid.begin >= valid.end || valid.begin > of.state->window_begin || valid.end < of.first_query;
  };
  return shape.max_q_len() == 1 && std::any_of(call.calls().begin(), call.calls().end(), lacks_rows);
}

// Plans a call with "auto". *moves: whether any keys move. Removes routes that get no keys from *taken.
Status plan_call(Call& call, const CallShape& shape, RoutesTaken* taken, bool* moves) {
  const SessionCore& session = call.session;
  const SizeTerms terms = session.terms();
  const Layer& outside = call.facts.outside;
  const int64_t longest = std::min(shape.most_queries, shape.max_q_len());
  for (const auto& route : session.key_routes)
    if (route != nullptr) TANDEM_TRY(route->try_out(call.cache(), session.device.get(), call.facts.idx));
  CallPlan& plan = call.scratch.plan;
  plan.clear(session.bus_ahead(call.facts.idx, longest));
  for (size_t i = 0; i < shape.sequences.size(); ++i) {
    const TokenRange tokens = terms.streamed(shape, shape.sequences[i]);
    plan.add(i, std::min(shape.most_queries, shape.sequences[i].q_len), tokens.begin, tokens.end);
  }
  plan.make(call.cache().engine().profile(), outside, token_kv_bytes(outside), session.rebuild_terms(call.facts.idx, true));
  *moves = plan.n_streamed() > 0;
  taken->uses[kPlanRecompute] = taken->uses[kPlanRecompute] && plan.n_rebuilt() > 0;
  return {};
}

// Describes what the profile can learn from a part. Small parts tell nothing.
void describe_part(const Call& chunk) {
  HandOverPart& part = chunk.task->part;
  const CallPlan& split = chunk.scratch.plan;
  part = {};
  double key_queries = 0.0;
  part.n_queries = 1;
  for (const PlannedKeys& keys : split.keys()) {
    part.streamed_tokens += keys.cpu_begin - keys.begin;
    part.host_tokens += keys.end - keys.cpu_begin;
    part.n_queries = std::max(part.n_queries, keys.n_queries);
    key_queries += static_cast<double>((keys.end - keys.cpu_begin) * keys.n_queries);
  }
  if (layouts_of(chunk.session.key_routes).empty()) return;
  part.layer = &chunk.facts.outside;
  part.key_bytes = token_kv_bytes(chunk.facts.outside);
  if (!is_worth_planning((part.streamed_tokens + part.host_tokens) * part.key_bytes)) return;
  part.weighed_keys = static_cast<int64_t>(key_queries / static_cast<double>(part.n_queries));
  // If all other keys are streamed, the sinks of streaming heads would look like the CPU's part of them. If weights are
  // counted, the CPU does more than attend.
  part.tells = !chunk.device().device().bus->has_weights() && (chunk.facts.heads == nullptr || part.host_tokens > 0) &&
               !chunk.facts.policy.keeps_maw;
  part.ahead_bytes = split.ahead().bytes;
  const RoutePlan& plan = split.plan();
  part.predicted_ns = plan.total_ns > 0.0 ? std::max(1.0, plan.seen_ns) : 0.0;
}

// Pins all keys that move, and waits for that. For routes that the caller has named.
bool pin_moved(const Call& chunk) {
  bool is_pinned = true;
  for (const PlannedKeys& keys : chunk.scratch.plan.keys())
    if (keys.begin < keys.cpu_begin)
      is_pinned =
          chunk.cache().pin(*chunk.calls()[keys.call].sequence, chunk.args.layer_idx, {keys.begin, keys.cpu_begin}) &&
          is_pinned;
  return is_pinned;
}

// For "auto": moves the keys that are already pinned, and has the rest pinned for later calls, with an eighth more, as
// splits change. Waits for the pinning if that takes less time than the CPU needs for these keys, as with many queries.
bool move_pinned(Call& chunk) {
  CallPlan& plan = chunk.scratch.plan;
  std::vector<int64_t>& ends = chunk.scratch.pinned_ends;
  ends.clear();
  double missing_ns = 0.0;
  for (const PlannedKeys& keys : plan.keys()) {
    ends.push_back(keys.end);
    if (keys.begin == keys.cpu_begin) continue;
    const Sequence& sequence = *chunk.calls()[keys.call].sequence;
    const int64_t ahead = (keys.cpu_begin - keys.begin) / 8;
    const auto pinned =
        chunk.cache().pin_ahead(sequence, chunk.args.layer_idx, {keys.begin, std::min(keys.cpu_begin + ahead, keys.end)});
    if (pinned.is_refused) return false;
    ends.back() = pinned.end;
    missing_ns += pinned.missing_ns;
  }
  if (missing_ns == 0.0) return true;
  if (plan.predict_ns(0.0) - plan.plan().total_ns > missing_ns) return pin_moved(chunk);
  for (size_t i = 0; i < ends.size(); ++i) plan.keep_from(i, ends[i]);
  return true;
}

// Cuts the keys that move into pieces and orders the pieces.
void cut_parts(const Call& chunk) {
  const RouteOptions& options = chunk.session.routes;
  const size_t rest = options.is_given() && options.route != kPlanRecompute ? options.route : size_t{kPlanStream};
  const std::span<const HeadRun> heads = chunk.facts.outside_runs.get();
  std::array<std::vector<KeyPart>, kMostRoutes>& parts = chunk.scratch.parts;
  for (std::vector<KeyPart>& of_route : parts) of_route.clear();
  for (size_t i = 0; i < chunk.calls().size(); ++i) {
    const SequenceCall& of = chunk.calls()[i];
    const int64_t rebuilt_end = std::max(of.host_begin, of.rebuilt_end);
    if (of.host_begin < rebuilt_end) parts[kPlanRecompute].push_back({i, heads, {of.host_begin, rebuilt_end}});
    if (rebuilt_end < of.cpu_begin) parts[rest].push_back({i, heads, {rebuilt_end, of.cpu_begin}});
  }
  for (size_t r = 0; r < kMostRoutes; ++r)
    if (!parts[r].empty()) chunk.session.key_routes[r]->choose(chunk.route_call(), parts[r], chunk.taken.layout);
  order_launches(chunk.task->n_pieces, &chunk.task->launches);
  chunk.task->part.n_pieces = std::ssize(chunk.task->launches);
}

}  // namespace

Status give_streams_up(Call& call, Status why) {
  call.taken = {};
  SessionCore& session = call.session;
  if (!session.routes.is_auto() || !is_for_lack_of_memory(why)) return why;
  session.refuses_streams = true;
  (void)session.key_routes[kPlanStream]->give_up(call.cache(), why);
  return {};
}

Status take_routes(Call& call, const CallShape& shape) {
  SessionCore& session = call.session;
  const SizeTerms terms = session.terms();
  const bool is_auto = session.routes.is_auto();
  RoutesTaken possible = possible_routes(terms, shape);
  call.taken = {};
  if (!possible.any() || (is_auto && session.refuses_streams)) return {};
  if (is_auto && is_first(call, shape)) return {};
  // Named units of a long append always move: the bus is faster than the CPU at thousands of queries.
  if (is_auto && shape.idx_heads == 0) {
    const int64_t longest = std::min(shape.most_queries, shape.max_q_len());
    if (Status status = try_unknown_routes(call, longest); !status.ok()) return give_streams_up(call, std::move(status));
    bool moves = false;
    TANDEM_TRY(plan_call(call, shape, &possible, &moves));
    if (!moves) return {};
  }
  for (size_t r = 0; r < kMostRoutes; ++r) {
    if (!possible.uses[r]) continue;
    Status status =
        session.key_routes[r]->hold({call.device(), call.cache(), terms, shape, call.scratch.shapes, call.calls()});
    if (status.ok()) continue;
    if (!is_auto || !is_for_lack_of_memory(status)) return status;
    if (r == kPlanStream) return give_streams_up(call, std::move(status));
    (void)session.key_routes[r]->give_up(call.cache(), status);
    possible.uses[r] = false;
  }
  call.taken = possible;
  return {};
}

void choose_routes(Call& chunk) {
  SessionCore& session = chunk.session;
  HandOverTask& task = *chunk.task;
  CallPlan& plan = chunk.scratch.plan;
  const Layer& outside = chunk.facts.outside;
  const int64_t key_bytes = token_kv_bytes(outside);
  plan.clear(session.bus_ahead(chunk.facts.idx, task.shape.max_q_len));
  for (size_t i = 0; i < chunk.calls().size(); ++i) {
    const SequenceCall& of = chunk.calls()[i];
    if (of.host_end > of.host_begin && can_stream(chunk.facts.policy, of.is_append))
      plan.add(i, of.q_len, of.host_begin, of.host_end);
  }
  describe_part(chunk);
  if (plan.keys().empty() || layouts_of(session.key_routes).empty()) return;
  const Profile& profile = chunk.cache().engine().profile();
  const bool moves = chunk.taken.any(), plans = moves && session.routes.is_auto();
  const RebuildTerms rebuild = session.rebuild_terms(chunk.facts.idx, chunk.taken.uses[kPlanRecompute]);
  if (plans)
    plan.make(profile, outside, key_bytes, rebuild);
  else
    plan.give(profile, outside, key_bytes, moves ? session.routes.moved_share : 0.0, rebuild);
  if (!accept_pins(chunk, plans ? move_pinned(chunk) : pin_moved(chunk))) plan.give(profile, outside, key_bytes, 0.0);
  for (const PlannedKeys& keys : plan.keys()) {
    chunk.calls()[keys.call].cpu_begin = keys.cpu_begin;
    chunk.calls()[keys.call].rebuilt_end = keys.rebuilt_end;
  }
  describe_part(chunk);
  HandOverPart& part = task.part;
  part.keeps_hidden = plans && plan.n_rebuilt() == 0 && session.rebuild_terms(chunk.facts.idx, true).may;
  if (part.streamed_tokens == 0) return;
  task.bases = chunk.cache().store().bases();
  cut_parts(chunk);
  part.streamed_tokens -= plan.n_rebuilt();
  if (part.x_bytes == 0) return;
  if (!plan.is_rebuilt_by_bus()) part.bus_tells = false;  // the bus waits for the device, which makes keys
  // Hidden states have buffers of their own.
  part.ahead_bytes = profile.as_keys(outside, rebuild.ahead_keys * outside.x_bytes()) +
                     (task.n_pieces[kPlanStream] == 0 ? 0 : plan.ahead().bytes);
}

bool accept_pins(Call& call, bool is_pinned) {
  if (is_pinned || !call.session.routes.is_auto()) return true;
  call.session.refuses_streams = true;
  call.taken = {};
  call.cache().engine().log(TANDEM_LOG_WARNING, "the device refuses to pin the host store: the CPU attends all of it");
  return false;
}

void wait_for_sent_rows(const Call& chunk) {
  HandOver& hand_over = chunk.session.hand_over();
  for (const SequenceCall& of : chunk.calls())
    if (of.streams()) hand_over.wait_for_rows(of.sequence->id, chunk.args.layer_idx, of.cpu_begin);
}

}  // namespace tandem
