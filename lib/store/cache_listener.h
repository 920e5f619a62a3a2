// SPDX-License-Identifier: MIT
// A listener follows a cache. A session is one: it keeps data of each sequence and has work in flight that the cache must
// wait for.
//
// The cache calls these functions with its mutex held exclusively, unless a comment says otherwise. A listener never takes
// the cache's mutex and never changes lengths. It names what must be rolled back, and the cache rolls that back.
#pragma once

#include <cstdint>
#include <functional>

#include "lib/base/status.h"

namespace tandem {

struct Sequence;
struct Watch;

// Limits a layer of a sequence to `length` tokens. The window then begins at window_begin or earlier.
struct Rollback {
  int64_t sequence = 0;
  int32_t layer_idx = 0;
  int64_t length = 0, window_begin = 0;
};

class CacheListener {
 public:
  virtual ~CacheListener() = default;
  // Functions that return a Status change nothing on failure. on_reserve(): room for n_tokens tokens in all, in every layer.
  virtual Status on_reserve(const Sequence& sequence, int64_t n_tokens, const Watch& watch) = 0;
  virtual Status prepare_fork(const Sequence& from, int64_t fork_id) = 0;
  virtual Status flush(const Sequence& sequence) = 0;  // finishes posted and due work on selections
  virtual void quiesce(const Sequence& sequence) = 0;  // afterwards no work reads the sequence's pages or positions
  // These cannot fail. The cache calls on_cut() before the length changes. It calls on_erase() after the rows have moved,
  // while lengths are still the old ones; cuts follow.
  virtual void on_cut(const Sequence& sequence, size_t layer_idx, int64_t n_tokens) = 0;
  virtual void on_erase(const Sequence& sequence, int64_t first, int64_t n_tokens) = 0;
  virtual void on_drop(int64_t sequence) = 0;
  // State of the listener's device work. These three are cheap. Any thread may call them, without a mutex.
  virtual bool is_settled() const = 0;     // nothing is in flight, and nothing has to be rolled back
  virtual bool has_lost() const = 0;       // nothing is in flight, but something has to be rolled back
  virtual bool has_open_step() const = 0;  // a step that is planned for the device is open
  // settle() waits until nothing is in flight. The cache then applies the rollbacks: it restores all windows, then cuts
  // layers, then calls on_settled(). Until then for_rollbacks() names the same rollbacks, and perhaps more after another
  // settle(). Both functions allocate nothing, so sessions and steps can end when memory is exhausted.
  virtual void settle() = 0;
  virtual void for_rollbacks(const std::function<void(const Rollback&)>& note) const = 0;
  virtual void restore_window(const Rollback& rollback) = 0;
  virtual void on_settled() = 0;
};

}  // namespace tandem
