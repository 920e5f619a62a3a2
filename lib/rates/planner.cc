// SPDX-License-Identifier: MIT
#include "lib/rates/planner.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tandem {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// at + s * of[0] + r * of[1], where s and r are the keys of the columns.
struct Linear {
  double at = 0.0, of[kPlanColumns] = {};

  Linear operator+(const Linear& other) const { return {at + other.at, {of[0] + other.of[0], of[1] + other.of[1]}}; }
  Linear operator-(const Linear& other) const { return *this + other * -1.0; }
  Linear operator*(double x) const { return {at * x, {of[0] * x, of[1] * x}}; }
};

// Finds the point where both are 0. Returns false if they do not meet in one point.
bool meet(const Linear& a, const Linear& b, double* s, double* r) {
  const double determinant = a.of[0] * b.of[1] - a.of[1] * b.of[0];
  const double size = (std::abs(a.of[0]) + std::abs(a.of[1])) * (std::abs(b.of[0]) + std::abs(b.of[1]));
  if (!(std::abs(determinant) > 1e-12 * size)) return false;
  *s = (a.of[1] * b.at - b.of[1] * a.at) / determinant;
  *r = (b.of[0] * a.at - a.of[0] * b.at) / determinant;
  return true;
}

int64_t n_keys_of(std::span<const PlanGroup> groups) {
  int64_t n = 0;
  for (const PlanGroup& group : groups) n += group.n_keys;
  return n;
}

class Search {
 public:
  Search(std::span<const PlanGroup> groups, const PlanRates& rates)
      : groups_(groups), rates_(rates), n_keys_(static_cast<double>(n_keys_of(groups))) {}

  // CPU, bus or device without keys has no start-up time. This happens only if no keys move or all keys move. Both are ends
  // of a stretch, which are tried, and predict_routes() leaves the start-up time out.
  RoutePlan best() {
    double begin = 0.0, work = 0.0;
    for (const PlanGroup& group : groups_) work += static_cast<double>(group.n_keys) * group.host_ns;
    try_stretch({work, {}}, 0.0, 0.0);
    for (const PlanGroup& group : groups_) {
      const double end = begin + static_cast<double>(group.n_keys);
      try_stretch({work + begin * group.host_ns, {-group.host_ns, -group.host_ns}}, begin, end);
      work -= static_cast<double>(group.n_keys) * group.host_ns;
      begin = end;
    }
    return best_;
  }

 private:
  // work: the CPU's work, as a function of the moved keys, while `begin` to `end` keys move.
  void try_stretch(const Linear& work, double begin, double end) {
    const Linear moved = {0.0, {1.0, 1.0}}, host = work + Linear{rates_.host_begin_ns, {}};
    Linear bus = {rates_.bus_begin_ns - rates_.bus_ahead_ns, {}}, device = {rates_.device_begin_ns, {}};
    for (int32_t c = 0; c < kPlanColumns; ++c) {
      bus.of[c] = rates_.columns[c].bus_ns;
      device.of[c] = rates_.columns[c].device_ns;
    }
    // Two cases: the bus has work left when the queries arrive, or only its start-up and end.
    const Linear left[] = {bus, {rates_.bus_begin_ns, {}}};
    Linear lines[13] = {
        {0.0, {1.0, 0.0}}, {0.0, {0.0, 1.0}}, moved - Linear{begin, {}}, moved - Linear{end, {}}, bus - left[1]};
    size_t n = 5;
    for (const Linear& of_bus : left) {
      const Linear bus_last = of_bus + host * (rates_.host_slowed * (1.0 - 1.0 / rates_.bus_slowed)),
                   host_last = host + of_bus * (rates_.bus_slowed * (1.0 - 1.0 / rates_.host_slowed));
      for (const Linear& line : {bus_last - host_last, bus_last - device, host_last - device, of_bus - device})
        lines[n++] = line;  // the last one applies if the CPU has no keys
    }
    for (const Linear& a : lines)
      for (const Linear& b : lines) {
        double s = 0.0, r = 0.0;
        if (&a < &b && meet(a, b, &s, &r)) try_split(s, r, begin, end);
      }
  }

  void try_split(double s, double r, double begin, double end) {
    const double slack = 1e-9 * (1.0 + n_keys_);
    if (!(s >= -slack && r >= -slack && s + r >= begin - slack && s + r <= end + slack)) return;
    s = std::clamp(s, 0.0, n_keys_);
    r = std::clamp(r, 0.0, n_keys_ - s);
    if (!rates_.columns[kPlanStream].is_allowed && s > slack) return;
    if (!rates_.columns[kPlanRecompute].is_allowed && r > slack) return;
    if (!rates_.host_is_allowed && s + r < n_keys_ - slack) return;
    const RoutePlan plan = predict_routes(groups_, rates_, s, r);
    if (plan.total_ns < best_.total_ns) best_ = plan;
  }

  std::span<const PlanGroup> groups_;
  const PlanRates& rates_;
  double n_keys_;
  RoutePlan best_{0, {}, kNever, kNever, kNever, kNever};
};

}  // namespace

RoutePlan predict_routes(std::span<const PlanGroup> groups, const PlanRates& rates, double streamed, double recomputed) {
  RoutePlan plan;
  const int64_t n_keys = n_keys_of(groups);
  plan.moved_keys[kPlanStream] = std::min<int64_t>(std::llround(streamed), n_keys);
  plan.moved_keys[kPlanRecompute] = std::min<int64_t>(std::llround(recomputed), n_keys - plan.moved_keys[kPlanStream]);
  plan.host_keys = n_keys - plan.n_moved();
  double left = streamed + recomputed, host = 0.0;
  for (const PlanGroup& group : groups) {
    const double moved = std::min(left, static_cast<double>(group.n_keys));
    host += (static_cast<double>(group.n_keys) - moved) * group.host_ns;
    left -= moved;
  }
  const double keys[] = {streamed, recomputed};
  double bus = 0.0, device = 0.0;
  for (int32_t c = 0; c < kPlanColumns; ++c) {
    bus += keys[c] * rates.columns[c].bus_ns;
    device += keys[c] * rates.columns[c].device_ns;
  }
  if (plan.host_keys > 0) host += rates.host_begin_ns;
  plan.device_ns = plan.n_moved() > 0 ? device + rates.device_begin_ns : 0.0;
  const double ahead = std::min(bus, rates.bus_ahead_ns);
  bus -= ahead;
  if (plan.n_moved() > 0) bus += rates.bus_begin_ns;
  const double host_slowed = host * rates.host_slowed, bus_slowed = bus * rates.bus_slowed;
  const bool host_ends_first = host_slowed <= bus_slowed;
  plan.host_ns = host_ends_first ? host_slowed : host + bus_slowed * (1.0 - 1.0 / rates.host_slowed);
  plan.bus_ns = host_ends_first ? bus + host_slowed * (1.0 - 1.0 / rates.bus_slowed) : bus_slowed;
  plan.total_ns = std::max({plan.host_ns, plan.bus_ns, plan.device_ns});
  plan.seen_ns = std::max({plan.host_ns, plan.bus_ns - (plan.n_moved() > 0 ? rates.bus_begin_ns : 0.0), plan.device_ns});
  plan.bus_ns += ahead;
  return plan;
}

RoutePlan plan_routes(std::span<const PlanGroup> groups, const PlanRates& rates) { return Search(groups, rates).best(); }

}  // namespace tandem
