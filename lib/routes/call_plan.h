// SPDX-License-Identifier: MIT
// The planner's answer for the sequences of a call: of each, where the keys end that cross the bus and the CPU's begin.
//
// Tokens [begin, cpu_begin) are streamed and [cpu_begin, end) attended by the CPU, at the same time. The older ones go: the
// store has had them for long, and what is pinned stays what is sent as sequences grow.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/routes/profile.h"

namespace tandem {

struct PlannedKeys {
  size_t call = 0;  // of a list of the caller's
  int64_t n_queries = 0;
  int64_t begin = 0, end = 0;  // tokens
  int64_t cpu_begin = 0;
  double host_ns = 0.0;  // of a key
};

// Of a call's keys outside the window: what is less takes no time to speak of, and tells nothing of what takes how long.
inline bool is_worth_planning(int64_t bytes) { return bytes >= int64_t{4} << 20; }

class CallPlan {
 public:
  void clear() { keys_.clear(); }
  void add(size_t call, int64_t n_queries, int64_t begin, int64_t end);
  // As takes the least time by what is known; all for the CPU where little is to be had.
  void make(const Profile& profile, const Layer& layer, int64_t key_bytes);
  // The same share of each sequence.
  void give(const Profile& profile, const Layer& layer, int64_t key_bytes, double streamed_share);

  const std::vector<PlannedKeys>& keys() const { return keys_; }
  const RoutePlan& plan() const { return plan_; }  // what it will take; of total_ns 0, nobody knows
  int64_t n_streamed() const;
  // Of the same keys, if this share were streamed. 0: nobody knows.
  double predict_ns(double streamed_share) const;

 private:
  void group(const Profile& profile, const Layer& layer, int64_t key_bytes);
  bool is_known() const;
  RoutePlan predict(double n_streamed) const;

  std::vector<PlannedKeys> keys_;
  std::vector<PlanGroup> groups_;
  PlanRates rates_;
  RoutePlan plan_;
};

}  // namespace tandem
