// SPDX-License-Identifier: MIT
// Who selects, head by head, the keys outside the window that a query attends.
//
// A policy (lib/policy/policy.h) that attends all keys, or the sinks alone, needs none of this. One that selects keys makes
// a Selector for each layer of a session, and the Selector makes a SelectState for each sequence. A call asks them in this
// order:
//
// clang-format off
//   prepare    the calling thread, before the call changes anything: takes the memory that can be known now
//   select     the thread of the host part, when the queries are there: the selection is up to date afterwards
//   selected   the same thread: the tokens, for each KV head
//   name_keys  instead of these two: keys for each block of queries, which names() has then
//   observe    the same thread, when all keys have been attended: weights of the call's queries are counted
//   committed  the calling thread, when the call has succeeded; finish follows outside of all locks
// clang-format on
//
// While tickets are in flight, prepare_on_device() and committed() of a state may run beside its select() and observe():
// they use fields of the calling thread alone. A selector uses the processors and the memory of the cache that it was made
// for. It knows no session, no window and no route.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lib/base/memory.h"
#include "lib/base/status.h"
#include "lib/policy/state_visitor.h"
#include "lib/tables/backend.h"
#include "lib/tables/planes.h"

namespace tandem {

class Cache;
struct HostSlot;
struct TicketCopy;
struct PolicyOptions;
struct QueryNames;
struct Sequence;
struct SequenceCall;

// Rows of consecutive selected tokens, side by side.
struct CopiedRows {
  int64_t first = 0;  // index of its first token among the head's selected tokens
  int64_t n_rows = 0;
  Buffer planes[kPlanes];  // [n_rows] rows each

  static Status create(Tier& tier, const PlaneBytes& bytes, int64_t first, int64_t n_rows, CopiedRows* rows);
  Rows row(const PlaneBytes& bytes, int64_t i) const {  // of selected token i
    Rows rows;
    for (int32_t p = 0; p < kPlanes; ++p) rows.of[p] = planes[p].data();
    return rows.after(bytes, i - first);
  }
};

// The tokens that a KV head has selected, ascending. copies: the rows of all these tokens, one block behind the other;
// empty: the rows are in the store alone.
struct SelectedTokens {
  std::span<const int32_t> tokens;
  std::span<const CopiedRows> copies;
};

// Tokens that a guess has kept: kept_idx counts within the guess, ascending.
struct KeptGuess {
  const Sequence& sequence;
  std::span<const int64_t> kept_idx;
};

class SelectState {
 public:
  virtual ~SelectState() = default;

  // The cache's mutex is held exclusively. Room for n_tokens tokens in all; after a failure some parts may have grown, which
  // does no harm.
  virtual bool has_room(int64_t n_tokens) const { return n_tokens >= 0; }
  virtual Status grow(int64_t, const Watch&) { return {}; }
  virtual Status copy_from(const SelectState&) { return {}; }  // of the same selector; this one is new
  // What is saved of the state, or loaded into it: one walk for both. The state has been joined, and no call uses it. One
  // that is loaded is new and has room for the sequence's tokens, all of which are in the store; no mutex is held then.
  virtual Status visit(StateVisitor&, const Sequence&, int64_t /*window_begin*/) { return {}; }
  // Tokens from n_tokens on are about to go, and the window begins at window_begin then.
  virtual void cut(const Sequence&, int64_t /*n_tokens*/, int64_t /*window_begin*/) {}
  // Tokens [first, first + n_tokens) have gone, and lengths are those of before.
  virtual void erase(const Sequence&, int64_t /*first*/, int64_t /*n_tokens*/) {}
  // Queries that wait to be counted are counted, and keys are judged.
  virtual Status catch_up(const Sequence&, int64_t /*window_begin*/) { return {}; }

  virtual int64_t join(const Watch& = {}) { return 0; }  // with background work; returns how long that took, in ns
  virtual void cancel() {}                               // background work: none begins any more

  virtual SelectedTokens selected(int32_t /*kv_head*/) const { return {}; }
  virtual int64_t n_selected(int32_t kv_head) const { return std::ssize(selected(kv_head).tokens); }
  // Of policies that keep moving averages of attention weights: of one query head from `token` on, as far as a multiple of
  // 2,048 tokens.
  virtual float* weights(int32_t /*q_head*/, int64_t /*token*/) const { return nullptr; }

  // A call, in the order above. On host tensors the queries of a call before it may have to be counted first.
  virtual Status prepare_on_host(SequenceCall*, bool /*is_speculative*/) { return {}; }
  // *n_evicted: tokens that leave windows with the call, of the sequences before this one and with it.
  virtual void prepare_on_device(SequenceCall*, bool /*is_speculative*/, TicketCopy*, int64_t* /*n_evicted*/) {}
  virtual void select(const SequenceCall&, TicketCopy*) {}  // may throw bad_alloc
  // Instead of select() and selected(), of policies that name keys for blocks of queries: CANCELLED; may throw bad_alloc.
  // What has been named is there up to the next call.
  virtual Status name_keys(const SequenceCall&, const Watch&) { return {}; }
  virtual const QueryNames* names() const { return nullptr; }
  // These two must not throw: the call has succeeded.
  virtual void committed(const SequenceCall&, bool /*is_speculative*/) {}
  virtual void finish(const SequenceCall&, const Watch&) {}

  // The end of a guess of host tensors, before kept rows move to their places; and of one of device tensors, behind that.
  // prepare_guess(): what may fail. *window_begin: moves as tokens leave the window.
  virtual Status prepare_guess(const KeptGuess&) { return {}; }
  virtual void count_guess(const KeptGuess&, bool /*have_moved*/, int64_t* /*window_begin*/) {}
  virtual void end_guess(int64_t /*old_window_begin*/, int64_t /*window_begin*/) {}
};

// Work space of observe(), kept between calls. states: has room for all of the call's, so that no memory is asked for once
// keys have left windows.
struct ObserveScratch {
  std::vector<SelectState*> states;
  std::vector<float> lse;
};

// What a call has left for selectors to learn from.
struct Observation {
  std::span<SequenceCall> calls;
  std::span<TicketCopy> late;      // [n_calls], of a call on device tensors
  const HostSlot* slot = nullptr;  // null: tensors are in host memory
  bool is_speculative = false;
  ObserveScratch* scratch = nullptr;
};

// Pairs of a query and a key, query head by query head.
struct AttendedPairs {
  int64_t n = 0, n_dense = 0;  // n_dense: what policy "all" would have attended

  // A block of queries [begin, end) has attended n_keys keys, each query those from newest_begin up to its own besides.
  void add(int64_t begin, int64_t end, int64_t n_keys, int64_t newest_begin) {
    const int64_t n_queries = end - begin, n_own = n_queries * (n_queries + 1) / 2;
    n += n_own + n_queries * (begin - newest_begin + n_keys);
    n_dense += n_own + n_queries * begin;
  }
};

class Selector {
 public:
  virtual ~Selector() = default;
  // Of appends that followed head patterns, since the selector was made.
  virtual AttendedPairs pairs() const { return {}; }
  virtual void count(const AttendedPairs&) {}
  virtual std::unique_ptr<SelectState> make_state() { return std::make_unique<SelectState>(); }
  // On device tensors it may throw bad_alloc. On host tensors it must not: the caller's outputs are written.
  virtual void observe(const Observation&) {}
};

// Sums of the background work of a session's selectors.
struct SelectorSums {
  std::atomic<int64_t> n_refreshes{0}, refresh_ns{0};
  std::atomic<int64_t> judged_bytes{0};  // read to choose keys
};

// What a selector is made for. All of it outlives the selector.
struct SelectorSetup {
  Cache* cache = nullptr;
  const PolicyOptions* options = nullptr;
  size_t layer_idx = 0;
  SelectorSums* sums = nullptr;
};

}  // namespace tandem
