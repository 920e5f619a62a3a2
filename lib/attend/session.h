// SPDX-License-Identifier: MIT
// A cache plus a policy: how its sequences are attended, and what was learned about each. What callers of the library see.
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
  // The end of a session that nobody has any more: at once for whoever looks at the cache. What its device still does is
  // waited for by the thread that meets it, without the cache's mutex, and its memory is given back after that.
  static void let_go(std::unique_ptr<Session> session);

  Status attend(const AttendArgs& args) { return executor_.attend(args); }
  // The end of speculation (lib/attend/speculation.cc).
  Status commit(int64_t sequence, const int64_t* kept_idx, int64_t n_kept);
  // stream: the step is planned for device tensors there; null: it is not.
  Status step_begin(const int64_t* sequences, const int64_t* q_lens, int32_t n_sequences, void* stream);
  Status step_end(void* stream) { return steps_.end(stream); }
  Status stats(tandem_session_stats* stats);
  AttendedPairs pattern_pairs(size_t layer_idx);
  // Of a call that is not made (lib/attend/route_plan.h). Fills all but struct_size.
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
