// SPDX-License-Identifier: MIT
// Selects, head by head, the keys outside the window that a query attends.
//
// A policy (lib/policy/policy.h) that attends all keys, or only the sinks, needs no selector. A policy that selects keys
// makes a Selector for each layer of a session. The Selector makes a SelectState for each sequence. A call uses them in this
// order:
//
// clang-format off
//   prepare    calling thread, before the call changes anything: allocates the memory that is known in advance
//   select     thread of the host part, once the queries are there: brings the selection up to date
//   selected   same thread: returns the tokens of each KV head
//   name_keys  replaces these two: names keys for each block of queries, returned by names()
//   observe    same thread, once all keys have been attended: counts the weights of the call's queries
//   committed  calling thread, once the call has succeeded; finish follows outside of all locks
// clang-format on
//
// While tickets are in flight, a state's prepare_on_device() and committed() may run beside its select() and observe(). They
// use only fields of the calling thread. A selector uses the processors and the memory of the cache that it was made for. It
// knows no session, no window and no route.
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
  int64_t first = 0;  // index of the first token among the head's selected tokens
  int64_t n_rows = 0;
  Buffer planes[kPlanes];  // n_rows rows each

  static Status create(Tier& tier, const PlaneBytes& bytes, int64_t first, int64_t n_rows, CopiedRows* rows);
  Rows row(const PlaneBytes& bytes, int64_t i) const {  // i: index among the selected tokens
    Rows rows;
    for (int32_t p = 0; p < kPlanes; ++p) rows.of[p] = planes[p].data();
    return rows.after(bytes, i - first);
  }
};

// A KV head's selected tokens, ascending. copies: the rows of all these tokens, in consecutive blocks; empty: the rows are
// only in the store.
struct SelectedTokens {
  std::span<const int32_t> tokens;
  std::span<const CopiedRows> copies;
};

// The tokens that are kept of a guess. kept_idx: indices within the guess, ascending.
struct KeptGuess {
  const Sequence& sequence;
  std::span<const int64_t> kept_idx;
};

class SelectState {
 public:
  virtual ~SelectState() = default;

  // Makes room for n_tokens tokens in all. The cache's mutex is held exclusively. After a failure some parts may have grown,
  // which is harmless.
  virtual bool has_room(int64_t n_tokens) const { return n_tokens >= 0; }
  virtual Status grow(int64_t, const Watch&) { return {}; }
  virtual Status copy_from(const SelectState&) { return {}; }  // the other state is of the same selector; this one is new
  // Saves the state or loads it: one walk serves both. The state has been joined, and no call uses it. A state to load is
  // new and has room for the sequence's tokens, all of which are in the store. No mutex is held while loading.
  virtual Status visit(StateVisitor&, const Sequence&, int64_t /*window_begin*/) { return {}; }
  // Tokens from n_tokens on are about to be removed. The window will begin at window_begin.
  virtual void cut(const Sequence&, int64_t /*n_tokens*/, int64_t /*window_begin*/) {}
  // Tokens [first, first + n_tokens) have been removed. The sequence's lengths are still the old ones.
  virtual void erase(const Sequence&, int64_t /*first*/, int64_t /*n_tokens*/) {}
  // Counts waiting queries and judges keys.
  virtual Status catch_up(const Sequence&, int64_t /*window_begin*/) { return {}; }

  virtual int64_t join(const Watch& = {}) { return 0; }  // waits for background work; returns the ns waited
  virtual void cancel() {}                               // prevents background work from starting

  virtual SelectedTokens selected(int32_t /*kv_head*/) const { return {}; }
  virtual int64_t n_selected(int32_t kv_head) const { return std::ssize(selected(kv_head).tokens); }
  // For policies that keep MAW: the weights of one query head from `token` on, up to the next multiple of 2,048 tokens.
  virtual float* weights(int32_t /*q_head*/, int64_t /*token*/) const { return nullptr; }

  // The steps of a call, in the order above. On host tensors prepare may first have to count queries of an earlier call.
  virtual Status prepare_on_host(SequenceCall*, bool /*is_speculative*/) { return {}; }
  // *n_evicted: running total of the tokens that leave windows with the call, this sequence included.
  virtual void prepare_on_device(SequenceCall*, bool /*is_speculative*/, TicketCopy*, int64_t* /*n_evicted*/) {}
  virtual void select(const SequenceCall&, TicketCopy*) {}  // may throw bad_alloc
  // Replaces select() and selected() in policies that name keys for blocks of queries. CANCELLED; may throw bad_alloc. The
  // names are kept until the next call.
  virtual Status name_keys(const SequenceCall&, const Watch&) { return {}; }
  virtual const QueryNames* names() const { return nullptr; }
  // These two must not throw, as the call has succeeded.
  virtual void committed(const SequenceCall&, bool /*is_speculative*/) {}
  virtual void finish(const SequenceCall&, const Watch&) {}

  // The end of a guess: on host tensors before kept rows move to their places, on device tensors afterwards. prepare_guess()
  // does all that may fail. *window_begin advances as tokens leave the window.
  virtual Status prepare_guess(const KeptGuess&) { return {}; }
  virtual void count_guess(const KeptGuess&, bool /*have_moved*/, int64_t* /*window_begin*/) {}
  virtual void end_guess(int64_t /*old_window_begin*/, int64_t /*window_begin*/) {}
};

// Work space of observe(), kept between calls. states: has room for all states of the call, so that nothing is allocated
// once keys have left windows.
struct ObserveScratch {
  std::vector<SelectState*> states;
  std::vector<float> lse;
};

// The data of a finished call that selectors learn from.
struct Observation {
  std::span<SequenceCall> calls;
  std::span<TicketCopy> late;      // [n_calls], for a call on device tensors
  const HostSlot* slot = nullptr;  // null: tensors are in host memory
  bool is_speculative = false;
  ObserveScratch* scratch = nullptr;
};

// Number of (query, key) pairs, counted query head by query head.
struct AttendedPairs {
  int64_t n = 0, n_dense = 0;  // n_dense: pairs under policy "all"

  // Adds a block of queries [begin, end). Each query attended n_keys keys and those from newest_begin up to its own.
  void add(int64_t begin, int64_t end, int64_t n_keys, int64_t newest_begin) {
    const int64_t n_queries = end - begin, n_own = n_queries * (n_queries + 1) / 2;
    n += n_own + n_queries * (begin - newest_begin + n_keys);
    n_dense += n_own + n_queries * begin;
  }
};

class Selector {
 public:
  virtual ~Selector() = default;
  // Pairs of the appends since the selector was made that followed head patterns.
  virtual AttendedPairs pairs() const { return {}; }
  virtual void count(const AttendedPairs&) {}
  virtual std::unique_ptr<SelectState> make_state() { return std::make_unique<SelectState>(); }
  // On device tensors it may throw bad_alloc. On host tensors it must not, as the caller's outputs have been written.
  virtual void observe(const Observation&) {}
};

// Sums of the background work of a session's selectors.
struct SelectorSums {
  std::atomic<int64_t> n_refreshes{0}, refresh_ns{0};
  std::atomic<int64_t> judged_bytes{0};  // bytes read to choose keys
};

// Arguments of a new selector. All objects outlive the selector.
struct SelectorSetup {
  Cache* cache = nullptr;
  const PolicyOptions* options = nullptr;
  size_t layer_idx = 0;
  SelectorSums* sums = nullptr;
};

}  // namespace tandem
