// SPDX-License-Identifier: MIT
// The planner's answer for the sequences of a call: of each, where the keys end that cross the bus and the CPU's begin.
//
// Tokens [begin, cpu_begin) go to the device, of these [begin, rebuilt_end) as hidden states (lib/pieces/rebuilt_pieces.h)
// and the others as K and V, and [cpu_begin, end) are attended by the CPU, at the same time. The older ones go: the store
// has had them for long, and what is pinned stays what is sent as sequences grow.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/rates/profile.h"

namespace tandem {

struct PlannedKeys {
  size_t call = 0;  // of a list of the caller's
  int64_t n_queries = 0;
  int64_t begin = 0, end = 0;  // tokens
  int64_t cpu_begin = 0, rebuilt_end = 0;
  double host_ns = 0.0;  // of a key
};

// Of a call's keys outside the window: what is less takes no time to speak of, and tells nothing of what takes how long.
inline bool is_worth_planning(int64_t bytes) { return bytes >= int64_t{4} << 20; }

// Whether keys may be made of hidden states, and which share of those that move; what the first and the last piece have of
// them, and how many buffers have room for before the queries come.
struct RebuildTerms {
  bool may = false;
  double share = 0.0;  // of a split that is given
  int64_t piece_keys = 0, ahead_keys = 0;
};

// How long the bus has for a call's pieces before its queries come, as calls went, and what it has room for meanwhile.
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
  // As takes the least time by what is known; all for the CPU where little is to be had.
  void make(const Profile& profile, const Layer& layer, int64_t key_bytes, const RebuildTerms& rebuild = {});
  // The same share of each sequence.
  void give(const Profile& profile, const Layer& layer, int64_t key_bytes, double streamed_share,
            const RebuildTerms& rebuild = {});

  // Of the i-th of keys(), those from `token` on stay with the CPU; all do where few are left.
  void keep_from(size_t i, int64_t token);

  const std::vector<PlannedKeys>& keys() const { return keys_; }
  const BusAhead& ahead() const { return ahead_; }
  const RoutePlan& plan() const { return plan_; }  // what it will take; of total_ns 0, nobody knows
  int64_t n_streamed() const;                      // rebuilt ones among them
  int64_t n_rebuilt() const;
  bool is_rebuilt_by_bus() const;  // the bus takes longer than making keys of what it brings
  // Of the same keys, if this share were streamed. 0: nobody knows.
  double predict_ns(double streamed_share) const;
  // If all were made of hidden states: at least that, where what making them takes is not known.
  double predict_rebuilt_ns() const;

 private:
  void group(const Profile& profile, const Layer& layer, int64_t key_bytes);
  void choose_rebuilt(double share);
  bool is_known() const;
  int64_t n_keys() const;
  int64_t most_queries() const;
  RoutePlan best_plan(bool may_rebuild);
  PlanRates rebuilding() const;  // rates of a call some of whose keys are made
  RoutePlan predict(int64_t n_streamed, int64_t n_rebuilt) const;

  std::vector<PlannedKeys> keys_;
  BusAhead ahead_;
  std::vector<PlanGroup> groups_;
  PlanRates rates_;
  RebuildTerms rebuild_;
  RoutePlan plan_;
};

}  // namespace tandem
