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
      scratch_(std::make_unique<AttendScratch>()) {}

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
    for (auto& layer : state->layers) cache_->engine().worker().cancel(layer->refresh.job);
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

int64_t Session::join(LayerState& state, const Watch& watch) {
  const int64_t waited_ns = cache_->engine().worker().join(state.refresh.job, watch);
  if (state.refresh.uncopied.exchange(false)) {
    cache_->engine().log(TANDEM_LOG_WARNING, "no memory for a copy of the selected keys: they are read from the store");
  }
  return waited_ns;
}

Status Session::on_reserve(const Sequence& sequence, int64_t n_tokens, const Watch& watch) {
  if (has_left_) return {};
  auto slot = states_.find(sequence.id);
  if (slot == states_.end()) {
    auto made = std::make_unique<SequenceState>();
    for (size_t l = 0; l < cache_->layers().size(); ++l) {
      made->layers.push_back(std::make_unique<LayerState>());
      if (policies_[l].keeps_maw) made->layers.back()->heads.resize(static_cast<size_t>(cache_->layers()[l].n_kv_heads));
    }
    slot = states_.emplace(sequence.id, std::move(made)).first;
  }
  SequenceState& found = *slot->second;
  for (size_t l = 0; l < found.layers.size(); ++l) {
    const Layer& layer = cache_->layers()[l];
    LayerState& state = *found.layers[l];
    if (!policies_[l].keeps_maw || n_tokens <= state.maw.capacity()) continue;
    cache_->settle(*this);
    join(state, watch);
    TANDEM_TRY(watch.check());
    // Indices first: a later call finds the capacity of the MAW short and comes here again.
    const int64_t capacity = (n_tokens + Maw::kBlock - 1) / Maw::kBlock * Maw::kBlock;
    for (HeadSelection& head : state.heads) {
      Buffer token_idx;
      if (head.token_idx.bytes() >= capacity * static_cast<int64_t>(sizeof(int32_t))) continue;
      TANDEM_TRY(
          Buffer::create(cache_->host_tier(), capacity * static_cast<int64_t>(sizeof(int32_t)), Use::kSession, &token_idx));
      std::copy_n(head.token_idx.as<int32_t>(), head.n_tokens, token_idx.as<int32_t>());
      head.token_idx.swap(token_idx);
    }
    TANDEM_TRY(state.maw.reserve(cache_->host_tier(), layer.n_q_heads, n_tokens, watch));
  }
  return {};
}

void Session::fill_runs(const Sequence& sequence, int32_t layer_idx, int64_t begin, int64_t length, KeyRuns* keys) const {
  const Layer& layer = cache_->layers()[static_cast<size_t>(layer_idx)];
  keys->runs.clear();
  for (int32_t h = 0; h < layer.n_kv_heads; ++h)
    for (int64_t t = begin; t < length; t += keys->runs.back().n_tokens)
      keys->runs.push_back(cache_->keys(sequence, cache_->key_tokens(sequence, {t, length}, layer_idx), layer_idx, h));
  keys->n_runs = std::ssize(keys->runs) / layer.n_kv_heads;
  keys->begin = begin;
  keys->length = length;
  keys->keeps_positions = layer.rope != nullptr && !sequence.positions.empty();
}

Status Session::flush_layer(const Sequence& sequence, int32_t layer_idx, LayerState& state) {
  join(state);
  if (!state.refresh.due) return {};
  fill_runs(sequence, layer_idx, 0, sequence.lengths[static_cast<size_t>(layer_idx)], &state.refresh.keys);
  reserve_refresh(state.refresh);
  state.refresh.host_end = state.window_begin;
  re_evaluate(state.refresh);
  state.is_unjudged = false;
  return {};
}

Status Session::flush(const Sequence& sequence) {
  SequenceState* found = state(sequence.id);
  if (found == nullptr) return {};
  fetch_maw(sequence);
  for (size_t l = 0; l < found->layers.size(); ++l)
    TANDEM_TRY(flush_layer(sequence, static_cast<int32_t>(l), *found->layers[l]));
  return {};
}

Status Session::prepare_fork(const Sequence& from, int64_t fork_id) {
  SequenceState* source = state(from.id);
  if (source == nullptr) return {};
  TANDEM_TRY(flush(from));
  Sequence twin;
  twin.id = fork_id;
  TANDEM_TRY(on_reserve(twin, 0, {}));
  Tier& tier = cache_->host_tier();
  SequenceState& made = *state(fork_id);
  for (size_t l = 0; l < made.layers.size(); ++l) {
    LayerState& to = *made.layers[l];
    const LayerState& old = *source->layers[l];
    to.window_begin = old.window_begin;
    TANDEM_TRY(to.maw.copy_from(tier, old.maw));
    for (size_t h = 0; h < to.heads.size(); ++h) {
      const HeadSelection& was = old.heads[h];
      HeadSelection& head = to.heads[h];
      if (was.token_idx.bytes() > 0) {
        TANDEM_TRY(Buffer::create(tier, was.token_idx.bytes(), Use::kSession, &head.token_idx));
        std::copy_n(was.token_idx.as<int32_t>(), was.n_tokens, head.token_idx.as<int32_t>());
      }
      head.n_tokens = was.n_tokens;
      if (was.n_copied == 0) continue;
      const PlaneBytes bytes = plane_bytes(cache_->layers()[l]);
      for (const SelectionChunk& chunk : was.chunks) {
        SelectionChunk copy;
        TANDEM_TRY(SelectionChunk::create(tier, bytes, chunk.first, chunk.n_rows, &copy));
        const int64_t n = std::min(chunk.n_rows, was.n_copied - chunk.first);
        if (n > 0) copy_rows(chunk.row(bytes, chunk.first), copy.row(bytes, chunk.first), bytes, n);
        head.chunks.push_back(std::move(copy));
      }
      head.n_copied = was.n_copied;
    }
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
  int64_t& begin = found->layers[static_cast<size_t>(rollback.layer_idx)]->window_begin;
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
  for (auto& layer : found->layers) join(*layer);
}

void Session::on_drop(int64_t id) {
  SequenceState* found = state(id);
  if (found == nullptr) return;
  for (auto& layer : found->layers) cache_->engine().worker().cancel(layer->refresh.job);
  states_.erase(id);
}

// The device has counted these queries in the window's keys, whether their tokens stay or not.
void Session::count_held_of_device(const Sequence& sequence, size_t layer_idx, LayerState& state) {
  if (state.refresh.n_queries == 0) return;
  try {
    fill_runs(sequence, static_cast<int32_t>(layer_idx), 0, sequence.lengths[layer_idx], &state.refresh.keys);
    reserve_refresh(state.refresh);
    count_held(state.refresh);
  } catch (const std::bad_alloc&) {
    state.refresh.n_queries = state.refresh.n_skipped = 0;
    cache_->engine().log(TANDEM_LOG_WARNING, "no memory to count an append's attention weights: they are forgotten");
  }
}

// Tokens that come back into the window leave the selections; whatever is cut off is forgotten.
void Session::on_cut(const Sequence& sequence, size_t layer_idx, int64_t n_tokens) {
  SequenceState* found = state(sequence.id);
  if (found == nullptr) return;
  fetch_maw(sequence);
  found->window.cut(layer_idx, n_tokens);
  LayerState& state = *found->layers[layer_idx];
  state.speculation = Speculation();
  join(state);
  if (state.is_unjudged) count_held_of_device(sequence, layer_idx, state);
  state.window_begin = std::min(state.window_begin, std::max<int64_t>(0, n_tokens - options_.window_len));
  Refresh& refresh = state.refresh;
  while (refresh.n_queries > 0 && refresh.end[static_cast<size_t>(refresh.n_queries) - 1] > n_tokens) --refresh.n_queries;
  if (refresh.n_queries == 0) refresh.n_skipped = 0;
  if (state.heads.empty()) return;
  state.maw.clear(cache_->layers()[layer_idx].n_q_heads, n_tokens, sequence.longest());
  for (HeadSelection& head : state.heads) head.cut(state.window_begin);
}

void Session::on_erase(const Sequence& sequence, int64_t first, int64_t n_tokens) {
  SequenceState* found = state(sequence.id);
  if (found == nullptr) return;
  found->window.cut(first);
  for (size_t l = 0; l < found->layers.size(); ++l) {
    const Layer& layer = cache_->layers()[l];
    LayerState& state = *found->layers[l];
    const int64_t last = first + n_tokens;
    if (state.window_begin >= last)
      state.window_begin -= n_tokens;
    else
      state.window_begin = std::min(state.window_begin, first);
    if (state.heads.empty()) continue;
    state.maw.erase(layer.n_q_heads, first, n_tokens, sequence.lengths[l]);
    for (HeadSelection& head : state.heads) {
      const PlaneBytes bytes = plane_bytes(cache_->layers()[l]);
      auto* idx = head.token_idx.as<int32_t>();
      int64_t n = 0, n_copied = 0;
      for (int64_t i = 0; i < head.n_tokens; ++i) {
        const int64_t moved = idx[i] >= last ? idx[i] - n_tokens : idx[i];
        if ((idx[i] >= first && idx[i] < last) || moved < options_.sink_len) continue;
        if (i < head.n_copied) {
          if (n != i) copy_rows(head.row(bytes, i), head.row(bytes, n), bytes, 1);
          n_copied = n + 1;
        }
        idx[n++] = static_cast<int32_t>(moved);
      }
      head.n_tokens = n;
      head.n_copied = n_copied;
    }
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
      LayerState& state = *found->layers[l];
      join(state);
      if (!state.heads.empty())
        sums_.host_keys += std::max<int64_t>(0, state.window_begin - options_.sink_len) * cache_->layers()[l].n_kv_heads;
      for (const HeadSelection& head : state.heads) sums_.selected_keys += head.n_tokens;
    }
  }
  const uint32_t struct_size = stats->struct_size;
  *stats = sums_;
  stats->struct_size = struct_size;
  stats->n_refreshes = n_refreshes_.load();
  stats->refresh_ns = refresh_ns_.load();
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
  LayerState& state = *this->state(head.sequence)->layers[l];
  TANDEM_TRY(flush_layer(*found, head.layer_idx, state));
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
    const HeadSelection& chosen = state.heads[static_cast<size_t>(head.kv_head)];
    const int32_t* idx = chosen.token_idx.as<int32_t>();
    const int32_t q_head = head.kv_head * layer.group_size + head.q_head_of_group;
    double sum = 0.0;
    for (int64_t i = 0; i < chosen.n_tokens; ++i) sum += *state.maw.at(q_head, idx[i]);
    for (int64_t i = 0; i < chosen.n_tokens; ++i)
      kept->put(idx[i], sum > 0.0 ? static_cast<float>(*state.maw.at(q_head, idx[i]) / sum) : 0.0f);
  }
  for (int64_t t = std::max(window_begin, least); t < length; ++t) kept->put(t, 0.0f);
  return {};
}

}  // namespace tandem
