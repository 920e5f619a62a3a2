// SPDX-License-Identifier: MIT
#include "lib/session.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "lib/attend_scratch.h"
#include "lib/device_status.h"
#include "lib/process_end.h"

namespace tandem {

Session::Session(std::shared_ptr<Cache> cache, LayerPolicies policies, const PolicyOptions& options,
                 const RouteOptions& routes)
    : cache_(std::move(cache)),
      policies_(std::move(policies)),
      options_(options),
      routes_(routes),
      scratch_(std::make_unique<AttendScratch>()) {
  for (size_t l = 0; l < cache_->layers().size(); ++l)
    selectors_.push_back(policies_[l].make != nullptr ? policies_[l].make({cache_.get(), &options_, l, &selector_sums_})
                                                      : std::make_unique<Selector>());
}

Status Session::create(std::shared_ptr<Cache> cache, const tandem_session_options& options,
                       std::unique_ptr<Session>* session) {
  LayerPolicies policies;
  PolicyOptions resolved;
  TANDEM_TRY(LayerPolicies::resolve(options, cache->layers(), &policies));
  TANDEM_TRY(resolve_policy_options(options, &resolved));
  RouteOptions routes;
  TANDEM_TRY(resolve_route_options(options, policies, cache->layers(), &routes));
  std::vector<HeadKinds> heads;
  TANDEM_TRY(resolve_streaming_heads(options, policies, cache->layers(), &heads));
  const Device* device = cache->engine().device();
  if (routes.always_streams() && device == nullptr)
    return fail(TANDEM_ERROR_UNSUPPORTED, "route", "route = \"%s\": the engine has no device", name_of(routes.route));
  if (device != nullptr) TANDEM_TRY(check_layers(*device, cache->layers()));
  std::vector<RebuildLayout> rebuilt;
  if (device != nullptr)
    TANDEM_TRY(find_rebuild_layouts(*device, cache->layers(), policies, routes, !heads.empty(), &rebuilt));
  std::vector<StreamLayout> layouts;
  if (device != nullptr && routes.route != Route::kHost)
    TANDEM_TRY(make_stream_layouts(cache->layers(), policies, cache->store().geometry().extent_len(), routes, &layouts));
  session->reset(new Session(std::move(cache), std::move(policies), resolved, routes));
  (*session)->keeps_awake_ = options.sleep_between_calls == 0;
  (*session)->heads_ = std::move(heads);
  (*session)->stream_layouts_ = std::move(layouts);
  (*session)->rebuild_layouts_ = std::move(rebuilt);
  return (*session)->cache_->attach(session->get());
}

Session::~Session() {
  leave();
  std::unique_lock lock(cache_->mutex());
  cache_->settle(*this);
  forget_all();
  cache_->detach(this);
}

// What others see of the session is gone. What is under way is not: they wait for it before they look, as ever.
void Session::leave() {
  std::unique_lock lock(cache_->mutex());
  if (std::exchange(has_left_, true)) return;
  // Nobody asks for MAW any more, and there may be no memory to fetch them.
  for (auto& [id, state] : states_)
    for (size_t l = 0; l < state->layers.size(); ++l) state->window.forget_maw(l);
  if (device_ != nullptr) is_leaving_ = true;
  if (plan_.is_open)
    device_->hand_over().abandon_step();
  else if (in_step_ && keeps_awake_)
    cache_->engine().cpu().table->rest(cache_->engine().cpu().self);
  cache_->give_up(this);
}

void Session::let_go(std::unique_ptr<Session> session) {
  if (session == nullptr) return;
  if (session->device_ != nullptr && process_ends()) return leave_behind(session.release());
  const bool is_idle = session->device_ == nullptr || session->device_->hand_over().is_idle();
  session->leave();
  if (session->device_ == nullptr) return;
  // CUDA frees memory when the device is idle, which takes no time where it is.
  constexpr int64_t kBrief = 100'000'000;
  const std::shared_ptr<UnderWay> endings = session->cache_->engine().endings();
  HandOver& hand_over = session->device_->hand_over();
  endings->add(1);
  hand_over.retire(
      [](void* context) {
        auto* const ended = static_cast<Session*>(context);
        const std::shared_ptr<UnderWay> all = ended->cache_->engine().endings();
        if (const AtWork at_work; at_work.may_begin()) {
          const std::shared_ptr<Cache> cache = ended->cache_;  // perhaps the engine's last
          delete ended;
        } else {
          leave_behind(ended);
        }
        all->add(-1);
      },
      session.release());
  if (is_idle) endings->drain(kBrief);
}

// Jobs end while the cache still tells this session about changes: they read its pages and positions.
void Session::forget_all() {
  for (auto& [id, state] : states_)
    for (LayerState& layer : state->layers) layer.selection->cancel();
  if (forgotten_.empty()) states_.swap(forgotten_);
}

SizeTerms Session::terms() const {
  return {cache_->engine().device(),
          cache_->layers(),
          cache_->store().geometry(),
          policies_,
          options_,
          routes_,
          heads_,
          stream_layouts_,
          rebuild_layouts_,
          device_ != nullptr ? &device_->geometry() : nullptr,
          most_prefill_bytes_};
}

SequenceState* Session::state(int64_t id) const {
  const auto found = states_.find(id);
  return found == states_.end() ? nullptr : found->second.get();
}

Status Session::on_reserve(const Sequence& sequence, int64_t n_tokens, const Watch& watch) {
  if (has_left_) return {};
  auto slot = states_.find(sequence.id);
  if (slot == states_.end()) {
    auto made = std::make_unique<SequenceState>();
    for (const auto& selector : selectors_) made->layers.push_back({0, selector->make_state()});
    slot = states_.emplace(sequence.id, std::move(made)).first;
  }
  SequenceState& found = *slot->second;
  for (LayerState& state : found.layers) {
    if (state.selection->has_room(n_tokens)) continue;
    cache_->settle(*this);
    TANDEM_TRY(state.selection->grow(n_tokens, watch));
  }
  return {};
}

Status Session::flush_layer(const Sequence& sequence, LayerState& state) {
  return state.selection->catch_up(sequence, state.window_begin);
}

Status Session::flush(const Sequence& sequence) {
  SequenceState* found = state(sequence.id);
  if (found == nullptr) return {};
  fetch_maw(sequence);
  for (LayerState& state : found->layers) TANDEM_TRY(flush_layer(sequence, state));
  return {};
}

Status Session::prepare_fork(const Sequence& from, int64_t fork_id) {
  SequenceState* source = state(from.id);
  if (source == nullptr) return {};
  TANDEM_TRY(flush(from));
  Sequence twin;
  twin.id = fork_id;
  TANDEM_TRY(on_reserve(twin, 0, {}));
  SequenceState& made = *state(fork_id);
  for (size_t l = 0; l < made.layers.size(); ++l) {
    made.layers[l].window_begin = source->layers[l].window_begin;
    TANDEM_TRY(made.layers[l].selection->copy_from(*source->layers[l].selection));
  }
  return {};
}

bool Session::is_settled() const {
  return device_ == nullptr || (device_->hand_over().is_settled() && !is_leaving_.load(std::memory_order_acquire));
}

bool Session::has_lost() const { return device_ != nullptr && device_->hand_over().is_idle() && !is_settled(); }

void Session::settle() {
  device_->hand_over().drain();
  device_->hand_over().mark_lost();
}

// A step that was lost is rolled back as a whole; else the layer alone, which may leave the sequence uneven. What has come
// and was not observed stays, but what the call was to evict has not been judged. Of a planned step that nobody will end not
// all rows may have come.
void Session::for_rollbacks(const std::function<void(const Rollback&)>& note) const {
  device_->hand_over().for_marked([&](const HandOverTask& task) {
    for (const TouchedSequence& was : task.touched)
      for (int32_t l = 0; l < static_cast<int32_t>(cache_->layers().size()); ++l) {
        const bool is_own = l == task.shape.layer_idx;
        if (!is_own && (task.step == 0 || !task.rolls_back)) continue;
        note({was.sequence, l, task.rolls_back ? was.length : INT64_MAX, is_own ? was.window_begin : INT64_MAX});
      }
  });
  if (!is_leaving_ || !plan_.is_open) return;
  for (const StepSequence& step : step_)
    for (size_t l = 0; l < step.lengths.size(); ++l) note({step.id, static_cast<int32_t>(l), step.lengths[l], INT64_MAX});
}

void Session::restore_window(const Rollback& rollback) {
  SequenceState* found = state(rollback.sequence);
  if (found == nullptr) return;
  int64_t& begin = found->layers[static_cast<size_t>(rollback.layer_idx)].window_begin;
  sums_.evicted_tokens -= std::max<int64_t>(0, begin - rollback.window_begin);
  begin = std::min(begin, rollback.window_begin);
}

void Session::on_settled() {
  device_->hand_over().forget_lost();
  if (!is_leaving_) return;
  plan_.is_open = false;
  forget_all();
  is_leaving_.store(false, std::memory_order_release);
}

Status Session::meet_fault(void* stream) {
  Status fault = device_->hand_over().fault();
  if (fault.ok() || !device_->hand_over().can_start_over()) return fault;
  bool captures = false;
  TANDEM_TRY(is_capturing(device_->device(), stream, &captures));
  if (captures) return fault;
  TANDEM_TRY(call_device(device_->device(), &DeviceTable::wait, stream));
  cache_->settle(*this);
  // Replays that nobody expected may have written to any window: rows come from the store again.
  for (auto& [id, state] : states_) {
    if (const Sequence* sequence = cache_->find(id); sequence != nullptr) fetch_maw(*sequence);
    state->window.cut(0);
  }
  TANDEM_TRY(device_->start_over(stream));
  return fault;
}

void Session::quiesce(const Sequence& sequence) {
  SequenceState* found = state(sequence.id);
  if (found == nullptr) return;
  for (LayerState& layer : found->layers) layer.selection->join();
}

void Session::on_drop(int64_t id) {
  SequenceState* found = state(id);
  if (found == nullptr) return;
  for (LayerState& layer : found->layers) layer.selection->cancel();
  states_.erase(id);
}

void Session::on_cut(const Sequence& sequence, size_t layer_idx, int64_t n_tokens) {
  SequenceState* found = state(sequence.id);
  if (found == nullptr) return;
  fetch_maw(sequence);
  found->window.cut(layer_idx, n_tokens);
  LayerState& state = found->layers[layer_idx];
  state.window_begin = std::min(state.window_begin, std::max<int64_t>(0, n_tokens - options_.window_len));
  state.selection->cut(sequence, n_tokens, state.window_begin);
}

void Session::on_erase(const Sequence& sequence, int64_t first, int64_t n_tokens) {
  SequenceState* found = state(sequence.id);
  if (found == nullptr) return;
  found->window.cut(first);
  for (LayerState& state : found->layers) {
    if (state.window_begin >= first + n_tokens)
      state.window_begin -= n_tokens;
    else
      state.window_begin = std::min(state.window_begin, first);
    state.selection->erase(sequence, first, n_tokens);
  }
}

int64_t Session::evicted_to(const LayerState& state, int64_t length) const {
  return outside_window(options_.window_len, cache_->page_len(), length, state.window_begin);
}

void Session::evict(LayerState& state, int64_t length) const { state.window_begin = evicted_to(state, length); }

Status Session::stats(tandem_session_stats* stats) {
  std::unique_lock lock(cache_->mutex());
  cache_->settle(*this);
  if (!plan_.is_open) sums_.selected_keys = sums_.host_keys = 0;  // while a step is under way, what was there before it
  for (auto& [id, found] : states_) {
    for (size_t l = 0; l < found->layers.size() && !plan_.is_open; ++l) {
      const LayerState& state = found->layers[l];
      const int32_t n_kv_heads = cache_->layers()[l].n_kv_heads;
      state.selection->join();
      if (policies_[l].make == nullptr) continue;
      sums_.host_keys += std::max<int64_t>(0, state.window_begin - options_.sink_len) * n_kv_heads;
      for (int32_t h = 0; h < n_kv_heads; ++h) sums_.selected_keys += std::ssize(state.selection->selected(h).tokens);
    }
  }
  const uint32_t struct_size = stats->struct_size;
  *stats = sums_;
  stats->struct_size = struct_size;
  stats->n_refreshes = selector_sums_.n_refreshes.load();
  stats->refresh_ns = selector_sums_.refresh_ns.load();
  if (device_ == nullptr) return {};
  const HandOver::Sums sums = device_->hand_over().sums();
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
  return {};
}

Status Session::selection(const HeadOfSequence& head, KeptKeys* kept) {
  const auto lock = cache_->lock_settled();
  Sequence* found = nullptr;
  // Selections of a planned step's sequences change while it is open.
  TANDEM_TRY(cache_->find_free(head.sequence, has_open_step() ? nullptr : this, &found));
  TANDEM_TRY(on_reserve(*found, found->longest(), {}));
  const auto l = static_cast<size_t>(head.layer_idx);
  const Layer& layer = cache_->layers()[l];
  LayerState& state = this->state(head.sequence)->layers[l];
  TANDEM_TRY(flush_layer(*found, state));
  const int64_t length = found->lengths[l];
  const Policy& policy = policies_[l];
  const HeadKinds* const kinds = head_kinds(l);
  const HostKeys host = kinds != nullptr && kinds->streams(head.kv_head) ? HostKeys::kSinks : policy.host_keys(false);
  // The next query sits at `length`: it sees itself too, which is not a key yet.
  int64_t window_begin = state.window_begin, sink_end = std::min(options_.sink_len, window_begin);
  if (host == HostKeys::kSinks) {
    window_begin = std::max<int64_t>(0, length + 1 - options_.window_len);
    sink_end = layer.sliding_window > 0 ? 0 : std::min({options_.sink_len, window_begin, length});
  }
  if (host == HostKeys::kAll) sink_end = window_begin;
  const int64_t least =
      layer.sliding_window > 0 ? cache_->first_within(*found, found->position(length), layer.sliding_window) : 0;
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
