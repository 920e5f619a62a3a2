// SPDX-License-Identifier: MIT
#include "lib/routes/call_plan.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace tandem {
namespace {

constexpr int64_t kPlannedUnit = 64;  // tokens: of splits that are planned
constexpr int64_t kGivenUnit = 16;    // of splits that are given
constexpr double kWorthIt = 0.97;     // of the CPU's time alone, at most, for keys to be moved at all
constexpr int64_t kLeastKeys = 512;   // of either, where both have some: below that, roundings are as large

int64_t cut(const PlannedKeys& keys, int64_t n_moved, int64_t unit) {
  if (n_moved <= 0) return keys.begin;
  if (n_moved >= keys.end - keys.begin) return keys.end;
  return std::clamp((keys.begin + n_moved + unit / 2) / unit * unit, keys.begin, keys.end);
}

}  // namespace

void CallPlan::add(size_t call, int64_t n_queries, int64_t begin, int64_t end) {
  if (begin < end) keys_.push_back({call, n_queries, begin, end, begin, 0.0});
}

int64_t CallPlan::n_streamed() const {
  int64_t n = 0;
  for (const PlannedKeys& keys : keys_) n += keys.cpu_begin - keys.begin;
  return n;
}

// Those whose keys cost the CPU the most go to the device first; of these the longest, which make the fewest pieces.
void CallPlan::group(const Profile& profile, const Layer& layer, int64_t key_bytes) {
  int64_t most_queries = 1;
  for (PlannedKeys& keys : keys_) {
    keys.host_ns = profile.host_ns(layer, keys.n_queries, 1);
    most_queries = std::max(most_queries, keys.n_queries);
  }
  std::sort(keys_.begin(), keys_.end(), [](const PlannedKeys& a, const PlannedKeys& b) {
    return std::tuple(b.host_ns, b.end - b.begin, a.call) < std::tuple(a.host_ns, a.end - a.begin, b.call);
  });
  groups_.clear();
  for (const PlannedKeys& keys : keys_) {
    if (groups_.empty() || groups_.back().host_ns != keys.host_ns) groups_.push_back({0, keys.host_ns});
    groups_.back().n_keys += keys.end - keys.begin;
  }
  rates_ = profile.rates(layer, most_queries, key_bytes);
}

void CallPlan::make(const Profile& profile, const Layer& layer, int64_t key_bytes) {
  group(profile, layer, key_bytes);
  const RoutePlan alone = predict_routes(groups_, rates_, 0.0, 0.0), best = plan_routes(groups_, rates_);
  int64_t left = best.total_ns < kWorthIt * alone.total_ns ? best.moved_keys[kPlanStream] : 0;
  if (left < kLeastKeys && best.host_keys > 0) left = 0;
  if (left > 0 && best.host_keys < kLeastKeys) left += best.host_keys;
  for (PlannedKeys& keys : keys_) {
    const int64_t n = std::min(left, keys.end - keys.begin);
    keys.cpu_begin = cut(keys, n, kPlannedUnit);
    left -= n;
  }
  plan_ = predict(static_cast<double>(n_streamed()));
}

void CallPlan::give(const Profile& profile, const Layer& layer, int64_t key_bytes, double streamed_share) {
  group(profile, layer, key_bytes);
  for (PlannedKeys& keys : keys_)
    keys.cpu_begin = cut(keys, std::llround(streamed_share * static_cast<double>(keys.end - keys.begin)), kGivenUnit);
  plan_ = predict(static_cast<double>(n_streamed()));
}

bool CallPlan::is_known() const {
  return rates_.columns[kPlanStream].is_allowed && !groups_.empty() && groups_.back().host_ns > 0.0;
}

RoutePlan CallPlan::predict(double n_streamed) const {
  return is_known() ? predict_routes(groups_, rates_, n_streamed, 0.0) : RoutePlan();
}

double CallPlan::predict_ns(double streamed_share) const {
  double n = 0.0;
  for (const PlanGroup& group : groups_) n += static_cast<double>(group.n_keys);
  return predict(streamed_share * n).total_ns;
}

}  // namespace tandem
