// SPDX-License-Identifier: MIT
#include "lib/attend/session.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "lib/attend/pattern_call.h"
#include "lib/attend/route_plan.h"
#include "lib/attend/searched_keys.h"
#include "lib/base/process_end.h"

namespace tandem {

Session::Session(std::unique_ptr<SessionCore> core)
    : core_(std::move(core)), states_(*core_), executor_(*core_), steps_(*core_, executor_.device()) {
  core_->states = &states_;
}

Status Session::create(std::shared_ptr<Cache> cache, const tandem_session_options& options,
                       std::unique_ptr<Session>* session) {
  std::unique_ptr<SessionCore> core;
  TANDEM_TRY(SessionCore::create(std::move(cache), options, &core));
  session->reset(new Session(std::move(core)));
  return (*session)->core_->cache->attach(&(*session)->states_);
}

// The routes' buffers are freed once no work is in flight, and before `device`, which has the flags that say so.
Session::~Session() {
  states_.leave();
  {
    std::unique_lock lock(core_->cache->mutex());
    core_->cache->settle(states_);
    states_.forget_all();
    core_->cache->detach(&states_);
  }
  if (core_->device != nullptr) core_->hand_over().stop();
  for (auto& route : core_->key_routes) route.reset();
}

void Session::let_go(std::unique_ptr<Session> session) {
  if (session == nullptr) return;
  SessionCore& core = *session->core_;
  if (core.device != nullptr && process_ends()) return leave_behind(session.release());
  const bool is_idle = core.device == nullptr || core.hand_over().is_idle();
  session->states_.leave();
  if (core.device == nullptr) return;
  // CUDA frees memory once the device is idle. On an idle device this takes no time, so let_go() waits briefly.
  constexpr int64_t kBrief = 100'000'000;
  const std::shared_ptr<UnderWay> endings = core.cache->engine().endings();
  endings->add(1);
  core.hand_over().retire(
      [](void* context) {
        auto* const ended = static_cast<Session*>(context);
        const std::shared_ptr<UnderWay> all = ended->cache().engine().endings();
        if (const AtWork at_work; at_work.may_begin()) {
          const std::shared_ptr<Cache> cache = ended->core_->cache;  // perhaps the engine's last reference
          delete ended;
        } else {
          leave_behind(ended);
        }
        all->add(-1);
      },
      session.release());
  if (is_idle) endings->drain(kBrief);
}

Status Session::step_begin(const int64_t* sequences, const int64_t* q_lens, int32_t n_sequences, void* stream) {
  return steps_.begin({sequences, static_cast<size_t>(n_sequences)}, q_lens, stream);
}

Status Session::set_weights(size_t layer_idx, const ProjectionBlocks& blocks) {
  return core_->weights.set(layer_idx, blocks, core_->cache->engine());
}

Status Session::plan(const CallsAhead& calls, tandem_route_plan* plan) { return plan_route(*core_, calls, plan); }

Status Session::stats(tandem_session_stats* stats) {
  SessionCore& core = *core_;
  std::unique_lock lock(core.cache->mutex());
  core.cache->settle(states_);
  tandem_session_stats& all = core.sums;
  // While a planned step is open, the values from before it are reported.
  if (!core.step.is_planned) all.selected_keys = all.host_keys = 0;
  states_.for_all([&](int64_t, const SequenceState& found) {
    if (!core.step.is_planned) all.selected_keys += count_searched_keys(core, found);
    for (size_t l = 0; l < found.layers.size() && !core.step.is_planned; ++l) {
      const LayerState& state = found.layers[l];
      const int32_t n_kv_heads = core.layers[l].layer.n_kv_heads;
      state.selection->join();
      if (core.policies[l].make == nullptr || core.policies[l].follows_patterns) continue;
      all.host_keys += std::max<int64_t>(0, state.window_begin - core.options.sink_len) * n_kv_heads;
      for (int32_t h = 0; h < n_kv_heads; ++h) all.selected_keys += state.selection->n_selected(h);
    }
  });
  const uint32_t struct_size = stats->struct_size;
  *stats = all;
  stats->struct_size = struct_size;
  stats->n_refreshes = core.selector_sums.n_refreshes.load();
  stats->refresh_ns = core.selector_sums.refresh_ns.load();
  stats->judged_kv_bytes = core.selector_sums.judged_bytes.load();
  const std::vector<ListedPairs> listed = read_listed_pairs(core);
  for (const SessionLayer& layer : core.layers) {
    const AttendedPairs pairs = layer.selector->pairs();
    stats->pattern_pairs += pairs.n + listed[layer.idx].n;
    stats->pattern_dense_pairs += pairs.n_dense;
    stats->resident_kv_bytes_read += listed[layer.idx].n_keys * plane_bytes(layer.layer).total();
  }
  if (core.device == nullptr) return {};
  const TaskSums sums = core.hand_over().sums();
  stats->n_host_parts = sums.n_host_parts;
  stats->host_part_ns = sums.host_part_ns;
  stats->staged_kv_bytes = sums.staged_kv_bytes;
  stats->n_stream_parts = sums.n_stream_parts;
  stats->stream_part_ns = sums.stream_part_ns;
  stats->streamed_kv_bytes = sums.streamed_kv_bytes;
  stats->n_joint_parts = sums.n_joint_parts;
  stats->host_part_tokens = sums.host_part_tokens;
  stats->stream_part_tokens = sums.stream_part_tokens;
  stats->n_planned_parts = sums.n_planned_parts;
  stats->predicted_part_ns = sums.predicted_part_ns;
  stats->planned_part_ns = sums.planned_part_ns;
  stats->streamed_x_bytes = sums.streamed_x_bytes;
  stats->host_kv_bytes_read += sums.selected_kv_bytes;
  stats->resident_kv_bytes_read += sums.resident_kv_bytes;
  return {};
}

AttendedPairs Session::pattern_pairs(size_t layer_idx) {
  std::unique_lock lock(core_->cache->mutex());
  core_->cache->settle(states_);
  AttendedPairs pairs = core_->layers[layer_idx].selector->pairs();
  pairs.n += read_listed_pairs(*core_)[layer_idx].n;
  return pairs;
}

Status Session::selection(const HeadOfSequence& head, KeptKeys* kept) {
  const SessionCore& core = *core_;
  const auto lock = core.cache->lock_settled();
  Sequence* found = nullptr;
  // Selections of a planned step's sequences change while it is open.
  TANDEM_TRY(core.cache->find_free(head.sequence, core.step.is_planned ? nullptr : &states_, &found));
  TANDEM_TRY(states_.on_reserve(*found, found->longest(), {}));
  const auto l = static_cast<size_t>(head.layer_idx);
  const SessionLayer& of = core.layers[l];
  const Layer& layer = of.layer;
  LayerState& state = states_.find(head.sequence)->layers[l];
  TANDEM_TRY(state.selection->catch_up(*found, state.window_begin));
  if (state.on_device == NamedOnDevice::kByPattern) {
    list_pattern_keys(core, head, state, kept);
    return {};
  }
  if (state.on_device != NamedOnDevice::kNone) return list_searched_keys(core, head, *states_.find(head.sequence), kept);
  if (!state.named.is_empty()) {
    const bool by_q_head = state.named.n_heads() > layer.n_kv_heads;  // after an append that followed head patterns
    const int32_t at = by_q_head ? head.kv_head * layer.group_size + head.q_head_of_group : head.kv_head;
    state.named.for_tokens(at, [&](TokenRange range) {
      for (int64_t t = range.begin; t < range.end; ++t) kept->put(t, 0.0f);
    });
    return {};
  }
  const int64_t length = found->lengths[l];
  const bool streams = of.heads != nullptr && of.heads->streams(head.kv_head);
  const HostKeys host = streams ? HostKeys::kSinks : of.policy.host_keys(false);
  // The next query is token `length`. It also sees itself, which is not a key yet.
  int64_t window_begin = state.window_begin, sink_end = std::min(core.options.sink_len, window_begin);
  if (host == HostKeys::kSinks) {
    window_begin = std::max<int64_t>(0, length + 1 - core.options.window_len);
    sink_end = layer.sliding_window > 0 ? 0 : std::min({core.options.sink_len, window_begin, length});
  }
  if (host == HostKeys::kAll || host == HostKeys::kNamed) sink_end = window_begin;  // nothing has been named yet
  const int64_t least = layer.sliding_window > 0 ? found->first_within(found->position(length), layer.sliding_window) : 0;
  for (int64_t t = least; t < sink_end; ++t) kept->put(t, 0.0f);
  if (host == HostKeys::kSelected) {
    const std::span<const int32_t> tokens = state.selection->selected(head.kv_head).tokens;
    const int32_t q_head = head.kv_head * layer.group_size + head.q_head_of_group;
    const auto weight = [&](int32_t token) {
      const float* weights = state.selection->weights(q_head, token);
      return weights != nullptr ? *weights : 0.0f;
    };
    double sum = 0.0;
    for (const int32_t token : tokens) sum += weight(token);
    for (const int32_t token : tokens) kept->put(token, sum > 0.0 ? static_cast<float>(weight(token) / sum) : 0.0f);
  }
  for (int64_t t = std::max(window_begin, least); t < length; ++t) kept->put(t, 0.0f);
  return {};
}

}  // namespace tandem
