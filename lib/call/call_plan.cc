// SPDX-License-Identifier: MIT
#include "lib/call/call_plan.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "lib/pieces/rebuilt_pieces.h"

namespace tandem {
namespace {

constexpr int64_t kPlannedUnit = 64;  // tokens: granularity of planned splits
constexpr int64_t kGivenUnit = 16;    // granularity of given splits
constexpr double kWorthIt = 0.97;     // keys are moved only if the time is below this share of the CPU's time alone
constexpr double kSurelyLess = 0.85;  // a time below this share of another is less, however the machine's clocks vary
constexpr int64_t kLeastKeys = 512;   // fewest keys of either side, where both have some: fewer are lost in rounding

int64_t cut(const PlannedKeys& keys, int64_t n_moved, int64_t unit) {
  if (n_moved <= 0) return keys.begin;
  if (n_moved >= keys.end - keys.begin) return keys.end;
  return std::clamp((keys.begin + n_moved + unit / 2) / unit * unit, keys.begin, keys.end);
}

}  // namespace

void CallPlan::add(size_t call, int64_t n_queries, int64_t begin, int64_t end) {
  if (begin < end) keys_.push_back({call, n_queries, begin, end, begin, begin, 0.0});
}

int64_t CallPlan::n_streamed() const {
  int64_t n = 0;
  for (const PlannedKeys& keys : keys_) n += keys.cpu_begin - keys.begin;
  return n;
}

int64_t CallPlan::n_rebuilt() const {
  int64_t n = 0;
  for (const PlannedKeys& keys : keys_) n += keys.rebuilt_end - keys.begin;
  return n;
}

bool CallPlan::is_rebuilt_by_bus() const {
  const PlanColumn& column = rates_.columns[kPlanRecompute];
  return column.is_allowed && column.device_ns < kSurelyLess * column.bus_ns;
}

// The device first gets the sequences whose keys cost the CPU the most, and among these the longest, which make the fewest
// pieces.
void CallPlan::group(const Profile& profile, const Layer& layer, int64_t key_bytes) {
  for (PlannedKeys& keys : keys_) keys.host_ns = profile.host_ns(layer, keys.n_queries, 1);
  std::sort(keys_.begin(), keys_.end(), [](const PlannedKeys& a, const PlannedKeys& b) {
    return std::tuple(b.host_ns, b.end - b.begin, a.call) < std::tuple(a.host_ns, a.end - a.begin, b.call);
  });
  groups_.clear();
  for (const PlannedKeys& keys : keys_) {
    if (groups_.empty() || groups_.back().host_ns != keys.host_ns) groups_.push_back({0, keys.host_ns});
    groups_.back().n_keys += keys.end - keys.begin;
  }
  rates_ = profile.rates(layer, most_queries(), key_bytes);
  const double room =
      static_cast<double>(ahead_.bytes) / static_cast<double>(key_bytes) * rates_.columns[kPlanStream].bus_ns;
  rates_.bus_ahead_ns = std::min(ahead_.ns, room);
  if (groups_.empty()) return;
  int64_t n_rows = 0;  // the rest of a sequence's pages is rebuilt as well
  for (const PlannedKeys& keys : keys_)
    n_rows += RebuiltPart{0, keys.begin, keys.end, 0}.n_pages() * RebuildLayout::kPageLen;
  rates_.columns[kPlanRecompute].device_ns *= static_cast<double>(n_rows) / static_cast<double>(n_keys());
}

// The rates that both ways share decide whether keys are made of hidden states; all costs of making them decide how many. A
// plan by all costs with fewer than kLeastKeys made keys is dropped: its end and its buffers do not fit sent keys.
RoutePlan CallPlan::best_plan(bool may_rebuild) {
  PlanColumn& recompute = rates_.columns[kPlanRecompute];
  const bool is_allowed = recompute.is_allowed && may_rebuild;
  recompute.is_allowed = is_allowed;
  RoutePlan best = plan_routes(groups_, rates_);
  if (best.moved_keys[kPlanRecompute] == 0) return best;
  best = plan_routes(groups_, rebuilding());
  if (best.moved_keys[kPlanRecompute] >= kLeastKeys) return best;
  recompute.is_allowed = false;
  best = plan_routes(groups_, rates_);
  recompute.is_allowed = is_allowed;
  return best;
}

// Returns the rates of a call that makes some keys, as parts have reported them. Buffers of hidden states have their own
// room.
PlanRates CallPlan::rebuilding() const {
  PlanRates rates = rates_;
  const double room = static_cast<double>(rebuild_.ahead_keys) * rates.columns[kPlanRecompute].bus_ns;
  rates.bus_ahead_ns = std::min(ahead_.ns, room);
  rates.host_begin_ns += rates.rebuilt_host_end_ns;
  if (rates.rebuilt_end_ns > 0.0) rates.bus_begin_ns = rates.rebuilt_end_ns;
  return rates;
}

void CallPlan::make(const Profile& profile, const Layer& layer, int64_t key_bytes, const RebuildTerms& rebuild) {
  rebuild_ = rebuild;
  group(profile, layer, key_bytes);
  const RoutePlan alone = predict_routes(groups_, rates_, 0.0, 0.0), best = best_plan(rebuild.may);
  int64_t left = best.total_ns < kWorthIt * alone.total_ns ? best.n_moved() : 0;
  if (left < kLeastKeys && best.host_keys > 0) left = 0;
  if (left > 0 && best.host_keys < kLeastKeys) left += best.host_keys;
  if (left == n_keys())
    if (const int64_t due = profile.host_due_keys(layer, most_queries(), best.total_ns); due >= kLeastKeys)
      left = std::max<int64_t>(0, left - due);
  double rebuilt =
      left > 0 ? static_cast<double>(best.moved_keys[kPlanRecompute]) / static_cast<double>(best.n_moved()) : 0.0;
  if (rebuilt * static_cast<double>(left) < static_cast<double>(kLeastKeys)) rebuilt = 0.0;
  if ((1.0 - rebuilt) * static_cast<double>(left) < static_cast<double>(kLeastKeys)) rebuilt = std::ceil(rebuilt);
  for (PlannedKeys& keys : keys_) {
    const int64_t n = std::min(left, keys.end - keys.begin);
    keys.cpu_begin = cut(keys, n, kPlannedUnit);
    left -= n;
  }
  choose_rebuilt(rebuilt);
  plan_ = predict(n_streamed(), n_rebuilt());
}

void CallPlan::give(const Profile& profile, const Layer& layer, int64_t key_bytes, double streamed_share,
                    const RebuildTerms& rebuild) {
  rebuild_ = rebuild;
  group(profile, layer, key_bytes);
  for (PlannedKeys& keys : keys_) {
    keys.cpu_begin = cut(keys, std::llround(streamed_share * static_cast<double>(keys.end - keys.begin)), kGivenUnit);
  }
  choose_rebuilt(rebuild.may ? rebuild.share : 0.0);
  plan_ = predict(n_streamed(), n_rebuilt());
}

void CallPlan::keep_from(size_t i, int64_t token) {
  PlannedKeys& keys = keys_[i];
  if (token >= keys.cpu_begin) return;
  keys.cpu_begin = token - keys.begin < kLeastKeys ? keys.begin : token;
  keys.rebuilt_end = std::min(keys.rebuilt_end, keys.cpu_begin);
  plan_ = predict(n_streamed(), n_rebuilt());
}

// share: of all moved keys. Rebuilds whole sequences as long as it can, since a page is a large share of a short one.
void CallPlan::choose_rebuilt(double share) {
  auto left = static_cast<int64_t>(std::ceil(share * static_cast<double>(n_streamed())));
  for (PlannedKeys& keys : keys_) {
    const int64_t n = rebuilt_tokens(left, keys.begin, keys.cpu_begin);
    keys.rebuilt_end = keys.begin + n;
    left -= n;
  }
}

bool CallPlan::is_known() const {
  return rates_.columns[kPlanStream].is_allowed && !groups_.empty() && groups_.back().host_ns > 0.0;
}

int64_t CallPlan::most_queries() const {
  int64_t most = 1;
  for (const PlannedKeys& keys : keys_) most = std::max(most, keys.n_queries);
  return most;
}

int64_t CallPlan::n_keys() const {
  int64_t n = 0;
  for (const PlanGroup& group : groups_) n += group.n_keys;
  return n;
}

// The device waits for the first piece of hidden states. It works on the last piece after the bus has ended, less the time
// of the streamed keys behind it, as pieces take turns. Where no part has reported that time, the time to make the keys
// counts.
RoutePlan CallPlan::predict(int64_t n_streamed, int64_t n_rebuilt) const {
  if (!is_known()) return {};
  const PlanRates rates = n_rebuilt > 0 ? rebuilding() : rates_;
  RoutePlan plan =
      predict_routes(groups_, rates, static_cast<double>(n_streamed - n_rebuilt), static_cast<double>(n_rebuilt));
  if (n_rebuilt == 0) return plan;
  const PlanColumn& column = rates_.columns[kPlanRecompute];
  const auto piece = static_cast<double>(std::min(n_rebuilt, rebuild_.piece_keys));
  plan.device_ns += piece * column.bus_ns;
  if (rates_.rebuilt_end_ns == 0.0) {
    const double behind = static_cast<double>(n_streamed - n_rebuilt) * rates_.columns[kPlanStream].bus_ns * piece /
                          static_cast<double>(n_rebuilt);
    const double late_ns = std::max(0.0, plan.bus_ns - rates.bus_ahead_ns);
    plan.device_ns = std::max(plan.device_ns, late_ns + std::max(0.0, piece * column.device_ns - behind));
  }
  plan.total_ns = std::max(plan.total_ns, plan.device_ns);
  plan.seen_ns = std::max(plan.seen_ns, plan.device_ns);
  return plan;
}

double CallPlan::predict_ns(double streamed_share) const {
  return predict(std::llround(streamed_share * static_cast<double>(n_keys())), 0).total_ns;
}

double CallPlan::predict_rebuilt_ns() const {
  if (rates_.columns[kPlanRecompute].bus_ns == 0.0) return 0.0;
  return predict(n_keys(), n_keys()).total_ns;
}

}  // namespace tandem
