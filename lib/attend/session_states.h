// SPDX-License-Identifier: MIT
// What a session knows of its cache's sequences, which follows the cache's changes.
//
// The map is touched under the cache's mutex alone, and a sequence in flight keeps its state. While tickets are in flight,
// the device's thread changes selections; the calling thread reads them after Cache::settle(). The device keeps the moving
// averages of attention weights (MAW) of the window's keys, the host those of all others, each counting what its own
// processor attends; a call hands over the MAW of the keys that leave the window with it.
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
  // Copies MAW of the window from the device to the selector's state, where the device has newer ones. Drains the ring
  // first.
  void fetch_maw(const Sequence& sequence);
  // Pages for calls of up to q_len queries of the sequence, which has `length` tokens then. *state: of the sequence.
  Status reserve_window(const Sequence& sequence, int64_t q_len, int64_t length, SequenceState** state);
  // Returns the fault of the device. Where calls may follow it: waits for the stream, rolls back, and tickets begin again.
  // The cache's mutex is held exclusively.
  Status meet_fault(void* stream);
  // Detaches the session from what others see. Its device work may still run; readers of the cache wait for it as usual.
  void leave();
  // Cancels background jobs and keeps the states' device memory. Comes before detach(): jobs read the cache's pages.
  void forget_all();
  // Of a sequence that the cache has not listed yet: a state with room for n_tokens tokens, which nobody else sees before
  // adopt(). The first needs no mutex.
  Status make(int64_t n_tokens, std::unique_ptr<SequenceState>* state) const;
  void adopt(int64_t id, std::unique_ptr<SequenceState> state) { states_.emplace(id, std::move(state)); }
  const SessionCore& core() const { return core_; }

  // Following the cache (lib/store/cache_listener.h).
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

  // visit(id, state) of all.
  template <typename F>
  void for_all(F visit) const {
    for (const auto& [id, state] : states_) visit(id, *state);
  }

 private:
  // Makes a state for the sequence, if there is none, and room for n_tokens tokens in it.
  Status hold(const Sequence& sequence, int64_t n_tokens, const Watch& watch, SequenceState** found);

  SessionCore& core_;
  std::unordered_map<int64_t, std::unique_ptr<SequenceState>> states_;
  std::unordered_map<int64_t, std::unique_ptr<SequenceState>>
      forgotten_;                        // dropped states, whose windows still own device memory
  bool has_left_ = false;                // guarded by the cache's mutex
  std::atomic<bool> is_leaving_{false};  // from leave() until the device work is settled
};

// Rows of [n_q_heads][kDevicePageLen] from or to the MAW of a page's tokens: move(the selector's, the page's, n).
template <typename F>
void for_maw_of_page(const SelectState& state, int32_t n_q_heads, TokenRange range, float* page, F move) {
  for (int32_t h = 0; h < n_q_heads; ++h)
    move(state.weights(h, range.begin), page + int64_t{h} * kDevicePageLen + range.begin % kDevicePageLen,
         range.end - range.begin);
}

// part(range) for the parts of [begin, end) in each page of a window.
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
