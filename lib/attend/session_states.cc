// SPDX-License-Identifier: MIT
#include "lib/attend/session_states.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "lib/machine/device_status.h"

namespace tandem {

SequenceState* SessionStates::find(int64_t id) const {
  const auto found = states_.find(id);
  return found == states_.end() ? nullptr : found->second.get();
}

void SessionStates::fetch_maw(const Sequence& sequence) {
  SequenceState* found = find(sequence.id);
  if (found == nullptr || core_.device == nullptr) return;
  DeviceSession& device = *core_.device;
  DeviceWindow& window = found->window;
  for (size_t l = 0; l < found->layers.size(); ++l) {
    if (!window.has_maw(l)) continue;
    device.hand_over().drain();
    const LayerState& state = found->layers[l];
    const int32_t n_q_heads = core_.layers[l].layer.n_q_heads;
    const TokenRange valid = window.valid(l);
    // After a call was rolled back, the window begins before the tokens whose MAW the device has.
    const int64_t begin = std::max({state.window_begin, window.maw_begin(l), valid.begin});
    float* const page = device.maw_page().data();
    window.forget_maw(l);
    const Status fetched = for_window_pages({begin, valid.end}, [&](TokenRange range) {
      const auto* from =
          reinterpret_cast<const std::byte*>(window.page_of(range.begin)) + device.geometry().layers[l].maw_at;
      void* const stream = nullptr;
      TANDEM_TRY(call_device(device.device(), &DeviceTable::copy, page, from,
                             int64_t{n_q_heads} * kDevicePageLen * static_cast<int64_t>(sizeof(float)), stream));
      for_maw_of_page(*state.selection, n_q_heads, range, page,
                      [](float* to, const float* of, int64_t n) { std::copy_n(of, n, to); });
      return Status();
    });
    if (!fetched.ok())
      core_.cache->engine().log(TANDEM_LOG_WARNING,
                                "the device is lost: attention weights of keys in the window are forgotten");
  }
}

Status SessionStates::reserve_window(const Sequence& sequence, int64_t q_len, int64_t length, SequenceState** state) {
  const int64_t longest = sequence.longest();
  TANDEM_TRY(hold(sequence, longest, {}, state));
  DeviceWindow& window = (*state)->window;
  const int64_t n_wanted = ring_pages(core_.options, core_.cache->page_len(), q_len);
  // A growing ring keeps its last pages, which may not include the pages of a layer that is behind. Rows can be restored
  // from the store, but these MAW are only here.
  const bool grows = window.n_pages() > 0 && window.n_pages() < n_wanted;
  if (grows && sequence.shortest() < longest) fetch_maw(sequence);
  return core_.device->reserve_window(window, n_wanted, longest, std::max({longest, length, int64_t{1}}));
}

Status SessionStates::meet_fault(void* stream) {
  HandOver& hand_over = core_.hand_over();
  Status fault = hand_over.fault();
  if (fault.ok() || !hand_over.can_start_over()) return fault;
  bool captures = false;
  TANDEM_TRY(is_capturing(core_.device->device(), stream, &captures));
  if (captures) return fault;
  TANDEM_TRY(call_device(core_.device->device(), &DeviceTable::wait, stream));
  core_.cache->settle(*this);
  // Unexpected replays may have written to any window, so its rows are copied from the store again.
  for (auto& [id, state] : states_) {
    if (const Sequence* sequence = core_.cache->find(id); sequence != nullptr) fetch_maw(*sequence);
    state->window.cut(0);
    state->window.forget_lists();
  }
  TANDEM_TRY(core_.device->start_over(stream));
  return fault;
}

void SessionStates::leave() {
  std::unique_lock lock(core_.cache->mutex());
  if (std::exchange(has_left_, true)) return;
  // MAW are not needed any more, and there may be no memory to fetch them.
  for (auto& [id, state] : states_)
    for (size_t l = 0; l < state->layers.size(); ++l) state->window.forget_maw(l);
  if (core_.device != nullptr) is_leaving_ = true;
  const Backend& cpu = core_.cache->engine().cpu();
  if (core_.step.is_planned)
    core_.hand_over().abandon_step();
  else if (core_.step.is_open && core_.keeps_awake)
    cpu.table->rest(cpu.self);
  core_.cache->give_up(this);
}

void SessionStates::forget_all() {
  for (auto& [id, state] : states_)
    for (LayerState& layer : state->layers) layer.selection->cancel();
  if (forgotten_.empty()) states_.swap(forgotten_);
}

Status SessionStates::on_reserve(const Sequence& sequence, int64_t n_tokens, const Watch& watch) {
  SequenceState* state = nullptr;
  return has_left_ ? Status() : hold(sequence, n_tokens, watch, &state);
}

Status SessionStates::make(int64_t n_tokens, std::unique_ptr<SequenceState>* state) const {
  *state = std::make_unique<SequenceState>();
  for (const SessionLayer& layer : core_.layers) {
    (*state)->layers.push_back({0, layer.selector->make_state()});
    SelectState& selection = *(*state)->layers.back().selection;
    if (!selection.has_room(n_tokens)) TANDEM_TRY(selection.grow(n_tokens, {}));
  }
  return {};
}

Status SessionStates::hold(const Sequence& sequence, int64_t n_tokens, const Watch& watch, SequenceState** found) {
  auto slot = states_.find(sequence.id);
  if (slot == states_.end()) {
    auto made = std::make_unique<SequenceState>();
    for (const SessionLayer& layer : core_.layers) made->layers.push_back({0, layer.selector->make_state()});
    slot = states_.emplace(sequence.id, std::move(made)).first;
  }
  *found = slot->second.get();
  if (!core_.has_selectors) return {};
  for (LayerState& state : slot->second->layers) {
    if (state.selection->has_room(n_tokens)) continue;
    core_.cache->settle(*this);
    TANDEM_TRY(state.selection->grow(n_tokens, watch));
  }
  return {};
}

Status SessionStates::flush(const Sequence& sequence) {
  SequenceState* found = find(sequence.id);
  if (found == nullptr) return {};
  fetch_maw(sequence);
  for (LayerState& state : found->layers) TANDEM_TRY(state.selection->catch_up(sequence, state.window_begin));
  return {};
}

Status SessionStates::prepare_fork(const Sequence& from, int64_t fork_id) {
  SequenceState* source = find(from.id);
  if (source == nullptr) return {};
  TANDEM_TRY(flush(from));
  Sequence twin;
  twin.id = fork_id;
  TANDEM_TRY(on_reserve(twin, 0, {}));
  SequenceState& made = *find(fork_id);
  for (size_t l = 0; l < made.layers.size(); ++l) {
    made.layers[l].window_begin = source->layers[l].window_begin;
    const NamedOnDevice named = source->layers[l].on_device;
    made.layers[l].on_device = named == NamedOnDevice::kKept ? NamedOnDevice::kGone : named;
    made.layers[l].named_end = source->layers[l].named_end;
    TANDEM_TRY(made.layers[l].selection->copy_from(*source->layers[l].selection));
  }
  return {};
}

void SessionStates::quiesce(const Sequence& sequence) {
  SequenceState* found = find(sequence.id);
  if (found == nullptr) return;
  for (LayerState& layer : found->layers) layer.selection->join();
}

void SessionStates::on_drop(int64_t id) {
  SequenceState* found = find(id);
  if (found == nullptr) return;
  for (LayerState& layer : found->layers) layer.selection->cancel();
  states_.erase(id);
}

void SessionStates::on_cut(const Sequence& sequence, size_t layer_idx, int64_t n_tokens) {
  SequenceState* found = find(sequence.id);
  if (found == nullptr) return;
  fetch_maw(sequence);
  found->window.cut(layer_idx, n_tokens);
  found->window.forget_lists(layer_idx);
  LayerState& state = found->layers[layer_idx];
  state.window_begin = std::min(state.window_begin, std::max<int64_t>(0, n_tokens - core_.options.window_len));
  state.selection->cut(sequence, n_tokens, state.window_begin);
  state.named.clear();
  state.on_device = NamedOnDevice::kNone;
}

void SessionStates::on_erase(const Sequence& sequence, int64_t first, int64_t n_tokens) {
  SequenceState* found = find(sequence.id);
  if (found == nullptr) return;
  found->window.cut(first);
  found->window.forget_lists();
  for (LayerState& state : found->layers) {
    if (state.window_begin >= first + n_tokens)
      state.window_begin -= n_tokens;
    else
      state.window_begin = std::min(state.window_begin, first);
    state.selection->erase(sequence, first, n_tokens);
    state.named.clear();
    state.on_device = NamedOnDevice::kNone;
  }
}

bool SessionStates::is_settled() const {
  return core_.device == nullptr || (core_.hand_over().is_settled() && !is_leaving_.load(std::memory_order_acquire));
}

bool SessionStates::has_lost() const { return core_.device != nullptr && core_.hand_over().is_idle() && !is_settled(); }

void SessionStates::settle() {
  core_.hand_over().drain();
  // Copies of rows whose ticket is lost may still run. Their pages must not be reused before they have ended.
  if (!core_.hand_over().is_settled() && core_.device->side() != nullptr) core_.device->side()->wait();
  core_.hand_over().mark_lost();
}

// A lost step is rolled back in all layers, a lost call only in its own, which may leave the layers uneven. Rows that
// arrived and were not observed stay, but the window begin is restored, as the tokens to evict have not been judged. A
// planned step that will never be ended is rolled back, as some of its rows may be missing.
void SessionStates::for_rollbacks(const std::function<void(const Rollback&)>& note) const {
  core_.hand_over().for_marked([&](const HandOverTask& task) {
    for (const TouchedSequence& was : task.touched())
      for (int32_t l = 0; l < static_cast<int32_t>(core_.layers.size()); ++l) {
        const bool is_own = l == task.shape.layer_idx;
        if (!is_own && (task.step == 0 || !task.rolls_back)) continue;
        note({was.sequence, l, task.rolls_back ? was.length : INT64_MAX, is_own ? was.window_begin : INT64_MAX});
      }
  });
  if (!is_leaving_ || !core_.step.is_planned) return;
  for (const OpenStep::Sequence& step : core_.step.sequences)
    for (size_t l = 0; l < core_.layers.size(); ++l) note({step.id, static_cast<int32_t>(l), step.length, INT64_MAX});
}

void SessionStates::restore_window(const Rollback& rollback) {
  SequenceState* found = find(rollback.sequence);
  if (found == nullptr) return;
  int64_t& begin = found->layers[static_cast<size_t>(rollback.layer_idx)].window_begin;
  core_.sums.evicted_tokens -= std::max<int64_t>(0, begin - rollback.window_begin);
  begin = std::min(begin, rollback.window_begin);
}

void SessionStates::on_settled() {
  core_.hand_over().forget_lost();
  if (!is_leaving_) return;
  core_.step.is_planned = false;
  forget_all();
  is_leaving_.store(false, std::memory_order_release);
}

}  // namespace tandem
