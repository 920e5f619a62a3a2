// SPDX-License-Identifier: MIT
// Splits the keys outside the window among CPU, bus and device, so that these three end together. The split is a function of
// their rates alone. The planner knows no caches and no devices.
//
// A key stays with the CPU, or moves to the device by one of the routes. Each route is a column of the rates. In a split,
// the CPU has A ns of work, the bus B ns and the device D ns. A and B are measured while nothing else reads the host's
// memory. Times count from the arrival of the queries. The CPU waits for the queries. The bus does not: B is the work that
// is left when they arrive. While both read host memory, each is slower. When one has ended, the other goes on at full
// speed. So, with the CPU slowed to A' = A host_slowed, and the bus to B':
//
//   A' <= B'    both take A', in which the bus has done A' / bus_slowed:    T = B + A' (1 - 1 / bus_slowed)
//   else                                                                    T = A + B' (1 - 1 / host_slowed)
//   in all      max(T, D)
//
// Both lines are linear in the keys of each column, as long as the moved keys have the same cost on the CPU. Sequences may
// have different numbers of queries. The keys that cost the CPU the most move first, so A is linear between the ends of
// groups. Within such a stretch this is a linear program in two variables. Its optimum is where two of 13 lines meet: a
// column has no keys, the stretch begins or ends, two of CPU, bus and device end together, or the bus ends as the queries
// arrive. All meeting points are tried.
#pragma once

#include <cstdint>
#include <span>

namespace tandem {

// Keys with the same cost on the CPU, because their sequences have the same number of queries.
struct PlanGroup {
  int64_t n_keys = 0;
  double host_ns = 0.0;  // per key, while the bus is idle
};

// A route to the device. Times are ns per key, over all its KV heads.
struct PlanColumn {
  bool is_allowed = false;
  double bus_ns = 0.0;  // while the CPU is idle
  double device_ns = 0.0;
};

enum PlanRoute : int32_t { kPlanStream, kPlanRecompute };
inline constexpr int32_t kPlanColumns = 2;

struct PlanRates {
  PlanColumn columns[kPlanColumns];
  bool host_is_allowed = true;
  double host_slowed = 1.0, bus_slowed = 1.0;  // while both are busy; below 1 the plan is good but may not be optimal
  double host_begin_ns = 0.0, bus_begin_ns = 0.0,
         device_begin_ns = 0.0;      // these three: added once if CPU, bus or device has any keys; never done ahead
  double bus_ahead_ns = 0.0;         // most work that the bus can have done when the queries arrive
  double rebuilt_end_ns = 0.0;       // replaces bus_begin_ns if keys are made; 0: unknown
  double rebuilt_host_end_ns = 0.0;  // added to host_begin_ns if keys are made
};

// host_ns, bus_ns: time until the CPU or the bus has ended, slowed by the other. bus_ns includes work done ahead; total_ns
// does not.
struct RoutePlan {
  int64_t host_keys = 0;
  int64_t moved_keys[kPlanColumns] = {};
  double host_ns = 0.0, bus_ns = 0.0, device_ns = 0.0, total_ns = 0.0;
  double seen_ns = 0.0;  // the share of total_ns that the host can see: until the last key has crossed the bus

  int64_t n_moved() const { return moved_keys[kPlanStream] + moved_keys[kPlanRecompute]; }
};

// groups: by falling host_ns. Keys move from the first groups on.
RoutePlan plan_routes(std::span<const PlanGroup> groups, const PlanRates& rates);
// Predicts the times of a given split.
RoutePlan predict_routes(std::span<const PlanGroup> groups, const PlanRates& rates, double streamed, double recomputed);

}  // namespace tandem
