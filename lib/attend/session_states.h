// SPDX-License-Identifier: MIT
// A session's state of its cache's sequences. It follows the cache's changes.
//
// The map is used only with the cache's mutex held, and a sequence in flight keeps its state. While tickets are in flight,
// the session's host thread changes selections; the calling thread reads them after Cache::settle(). The device keeps the
// moving averages of attention weights (MAW) of the window's keys, the host those of all other keys. Each counts the
// attention of its own processor. A call hands over the MAW of the keys that it evicts.
#pragma once

#include <atomic>
#include <memory>
#include <unordered_map>

#include "lib/attend/session_core.h"
#include "lib/call/sequence_state.h"

namespace tandem {

class SessionStates final : public CacheListener {
 public:
  explicit SessionStates(SessionCore& core) : core_(core) {}

  SequenceState* find(int64_t id) const;  // null: the session has not seen the sequence
  // Copies the window's MAW from the device to the selector's state, if the device has newer ones. Drains the ring of tasks
  // first.
  void fetch_maw(const Sequence& sequence);
  // Gets pages for calls of up to q_len queries, with `length` tokens in the sequence then. *state: the sequence's.
  Status reserve_window(const Sequence& sequence, int64_t q_len, int64_t length, SequenceState** state);
  // Returns the fault of the device. If calls may follow it, waits for the stream, rolls back and starts over with ticket 0.
  // The cache's mutex is held exclusively.
  Status meet_fault(void* stream);
  // Detaches the session from other users of the cache. Its device work may still run; readers of the cache wait for it as
  // usual.
  void leave();
  // Cancels background jobs and keeps the states' device memory. Comes before detach(): jobs read the cache's pages.
  void forget_all();
  // Makes a state for a sequence that the cache has not listed yet, with room for n_tokens tokens. The state is private
  // until adopt(). make() needs no mutex.
  Status make(int64_t n_tokens, std::unique_ptr<SequenceState>* state) const;
  void adopt(int64_t id, std::unique_ptr<SequenceState> state) { states_.emplace(id, std::move(state)); }
  const SessionCore& core() const { return core_; }

  // Functions of CacheListener (lib/store/cache_listener.h).
  Status on_reserve(const Sequence& sequence, int64_t n_tokens, const Watch& watch) override;
  Status prepare_fork(const Sequence& from, int64_t fork_id) override;
  Status flush(const Sequence& sequence) override;
  void quiesce(const Sequence& sequence) override;
  void on_cut(const Sequence& sequence, size_t layer_idx, int64_t n_tokens) override;
  void on_erase(const Sequence& sequence, int64_t first, int64_t n_tokens) override;
  void on_drop(int64_t id) override;
  bool is_settled() const override;
  bool has_lost() const override;
  bool has_open_step() const override { return core_.step.is_planned.load(std::memory_order_relaxed); }
  void settle() override;
  void for_rollbacks(const std::function<void(const Rollback&)>& note) const override;
  void restore_window(const Rollback& rollback) override;
  void on_settled() override;

  // Calls visit(id, state) for each state.
  template <typename F>
  void for_all(F visit) const {
    for (const auto& [id, state] : states_) visit(id, *state);
  }

 private:
  // Finds or makes the sequence's state and makes room for n_tokens tokens in it.
  Status hold(const Sequence& sequence, int64_t n_tokens, const Watch& watch, SequenceState** found);

  SessionCore& core_;
  std::unordered_map<int64_t, std::unique_ptr<SequenceState>> states_;
  std::unordered_map<int64_t, std::unique_ptr<SequenceState>>
      forgotten_;                        // dropped states, whose windows still own device memory
  bool has_left_ = false;                // guarded by the cache's mutex
  std::atomic<bool> is_leaving_{false};  // from leave() until the device work is settled
};

// Copies rows [n_q_heads][kDevicePageLen] from or to the MAW of a page's tokens: move(selector's row, page's row, n).
template <typename F>
void for_maw_of_page(const SelectState& state, int32_t n_q_heads, TokenRange range, float* page, F move) {
  for (int32_t h = 0; h < n_q_heads; ++h)
    move(state.weights(h, range.begin), page + int64_t{h} * kDevicePageLen + range.begin % kDevicePageLen,
         range.end - range.begin);
}

// Calls part(range) for the part of `range` in each page of a window.
template <typename F>
Status for_window_pages(TokenRange range, F part) {
  for (int64_t t = range.begin; t < range.end;) {
    const int64_t end = std::min(range.end, (t / kDevicePageLen + 1) * kDevicePageLen);
    TANDEM_TRY(part(TokenRange{t, end}));
    t = end;
  }
  return {};
}

}  // namespace tandem
