// SPDX-License-Identifier: MIT
// The planner's answer for the sequences of a call: for each sequence, which keys cross the bus and which the CPU attends.
//
// Tokens [begin, cpu_begin) go to the device. Of these, [begin, rebuilt_end) go as hidden states
// (lib/pieces/rebuilt_pieces.h), the rest as K and V. The CPU attends [cpu_begin, end) at the same time. The older tokens go
// to the device because the store already has them, and because the pinned tokens stay the sent ones as sequences grow.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/rates/profile.h"

namespace tandem {

struct PlannedKeys {
  size_t call = 0;  // index in a list of the caller's
  int64_t n_queries = 0;
  int64_t begin = 0, end = 0;  // tokens
  int64_t cpu_begin = 0, rebuilt_end = 0;
  double host_ns = 0.0;  // CPU time of one key
};

// Returns whether a call has enough keys outside the window to be planned. Fewer bytes take negligible time, and their
// timing says nothing about rates.
inline bool is_worth_planning(int64_t bytes) { return bytes >= int64_t{4} << 20; }

// How hidden states may be used: whether keys may be made of them, the share of the moved keys, and sizes in keys.
// piece_keys is the size of the first and of the last piece. ahead_keys is the room of the buffers before the queries
// arrive.
struct RebuildTerms {
  bool may = false;
  double share = 0.0;  // of the moved keys, when the split is given
  int64_t piece_keys = 0, ahead_keys = 0;
};

// How long the bus can work on a call's pieces before the queries arrive, as earlier calls went, and how many bytes the
// buffers take meanwhile.
struct BusAhead {
  double ns = 0.0;
  int64_t bytes = 0;
};

class CallPlan {
 public:
  void clear(const BusAhead& ahead = {}) {
    keys_.clear();
    ahead_ = ahead;
  }
  void add(size_t call, int64_t n_queries, int64_t begin, int64_t end);
  // Chooses the split that takes the least time by the known rates. Leaves all keys to the CPU where the gain is small.
  void make(const Profile& profile, const Layer& layer, int64_t key_bytes, const RebuildTerms& rebuild = {});
  // Moves the same share of each sequence.
  void give(const Profile& profile, const Layer& layer, int64_t key_bytes, double streamed_share,
            const RebuildTerms& rebuild = {});

  // Leaves the tokens of keys()[i] from `token` on to the CPU; all of them where only few would move.
  void keep_from(size_t i, int64_t token);

  const std::vector<PlannedKeys>& keys() const { return keys_; }
  const BusAhead& ahead() const { return ahead_; }
  const RoutePlan& plan() const { return plan_; }  // predicted times; total_ns is 0 if they are unknown
  int64_t n_streamed() const;                      // includes the rebuilt ones
  int64_t n_rebuilt() const;
  bool is_rebuilt_by_bus() const;  // the bus takes longer to bring hidden states than the device to make keys of them
  // Returns the predicted ns of the same keys if this share were streamed; 0 if unknown.
  double predict_ns(double streamed_share) const;
  // Returns the predicted ns if all keys were made of hidden states. A lower bound where the time to make them is unknown.
  double predict_rebuilt_ns() const;

 private:
  void group(const Profile& profile, const Layer& layer, int64_t key_bytes);
  void choose_rebuilt(double share);
  bool is_known() const;
  int64_t n_keys() const;
  int64_t most_queries() const;
  RoutePlan best_plan(bool may_rebuild);
  PlanRates rebuilding() const;  // rates of a call that makes some keys of hidden states
  RoutePlan predict(int64_t n_streamed, int64_t n_rebuilt) const;

  std::vector<PlannedKeys> keys_;
  BusAhead ahead_;
  std::vector<PlanGroup> groups_;
  PlanRates rates_;
  RebuildTerms rebuild_;
  RoutePlan plan_;
};

}  // namespace tandem
