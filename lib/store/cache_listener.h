// SPDX-License-Identifier: MIT
// Who follows a cache: a session keeps data of each sequence, and has work under way that the cache must wait for.
//
// The cache calls these functions with its mutex held exclusively, unless a comment says otherwise. A listener takes no
// mutex of the cache's and changes no lengths: it says what has to be rolled back, and the cache does that.
#pragma once

#include <cstdint>
#include <functional>

#include "lib/base/status.h"

namespace tandem {

struct Sequence;
struct Watch;

// A layer of a sequence is no longer than `length`, and its window begins no later than window_begin.
struct Rollback {
  int64_t sequence = 0;
  int32_t layer_idx = 0;
  int64_t length = 0, window_begin = 0;
};

class CacheListener {
 public:
  virtual ~CacheListener() = default;
  // Those that return a Status change nothing on failure. Room for n_tokens tokens in all, in every layer.
  virtual Status on_reserve(const Sequence& sequence, int64_t n_tokens, const Watch& watch) = 0;
  virtual Status prepare_fork(const Sequence& from, int64_t fork_id) = 0;
  virtual Status flush(const Sequence& sequence) = 0;  // work on selections that is posted or due has been done
  virtual void quiesce(const Sequence& sequence) = 0;  // no work reads its pages or positions any more
  // Cannot fail. on_cut() comes before the length changes; on_erase() when rows have moved and lengths are the old ones, and
  // cuts follow.
  virtual void on_cut(const Sequence& sequence, size_t layer_idx, int64_t n_tokens) = 0;
  virtual void on_erase(const Sequence& sequence, int64_t first, int64_t n_tokens) = 0;
  virtual void on_drop(int64_t sequence) = 0;
  // Work on a device. These three are cheap; any thread may call them, without a mutex.
  virtual bool is_settled() const = 0;     // none is under way, and nothing has to be rolled back
  virtual bool has_lost() const = 0;       // none is under way, but something has to be rolled back
  virtual bool has_open_step() const = 0;  // a step that has been planned for the device
  // Waits until none is under way. The cache then applies the rollbacks: it tells of all windows, then cuts layers, and says
  // when it has done so. Until then for_rollbacks() names the same ones, after another settle() perhaps more. Both ask for
  // no memory: sessions end, and steps are closed, where there is none.
  virtual void settle() = 0;
  virtual void for_rollbacks(const std::function<void(const Rollback&)>& note) const = 0;
  virtual void restore_window(const Rollback& rollback) = 0;
  virtual void on_settled() = 0;
};

}  // namespace tandem
