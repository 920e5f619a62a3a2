// SPDX-License-Identifier: MIT
// A cache with a policy: how its sequences are attended, and what was learned about each. The interface for callers.
#pragma once

#include <memory>

#include "lib/attend/executor.h"
#include "lib/attend/session_states.h"
#include "lib/attend/steps.h"
#include "lib/call/call_args.h"

namespace tandem {

class Session {
 public:
  static Status create(std::shared_ptr<Cache> cache, const tandem_session_options& options,
                       std::unique_ptr<Session>* session);
  ~Session();
  // Ends a session that has no more users. Other users of the cache see it gone at once. Its host thread waits for the
  // device's work in flight, without the cache's mutex, and then frees its memory.
  static void let_go(std::unique_ptr<Session> session);

  Status attend(const AttendArgs& args) { return executor_.attend(args); }
  // Ends speculation (lib/attend/speculation.cc).
  Status commit(int64_t sequence, const int64_t* kept_idx, int64_t n_kept);
  // stream: plans the step for device tensors on this stream; null: the step is not planned.
  Status step_begin(const int64_t* sequences, const int64_t* q_lens, int32_t n_sequences, void* stream);
  Status step_end(void* stream) { return steps_.end(stream); }
  Status stats(tandem_session_stats* stats);
  AttendedPairs pattern_pairs(size_t layer_idx);
  // Plans a call without making it (lib/attend/route_plan.h). Fills all fields but struct_size.
  Status plan(const CallsAhead& calls, tandem_route_plan* plan);
  Status selection(const HeadOfSequence& head, KeptKeys* kept);
  Status set_weights(size_t layer_idx, const ProjectionBlocks& blocks);

  Cache& cache() const { return *core_->cache; }
  SessionStates& states() { return states_; }

 private:
  explicit Session(std::unique_ptr<SessionCore> core);

  const std::unique_ptr<SessionCore> core_;
  SessionStates states_;
  Executor executor_;
  Steps steps_;
};

}  // namespace tandem
