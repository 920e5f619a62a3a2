// SPDX-License-Identifier: MIT
// How the keys outside the window are shared out, so that the engines that work on them end together: a function of what
// they take, which knows nothing of caches or devices.
//
// A key stays with the CPU, or it moves to the device by one of the columns. With what is moved, the CPU has A of work and
// the bus B, each in ns when it has the host's memory for itself, and the device D. Times count from when the queries are
// there, which the CPU waits for. The bus does not: B is what is left of its work by then. While both read that memory each
// is slower; when one has ended the other goes on alone. So, where the CPU is slowed to A' = A host_slowed, the bus to B':
//
//   A' <= B'    both take A', in which the bus has done A' / bus_slowed:    T = B + A' (1 - 1 / bus_slowed)
//   else                                                                    T = A + B' (1 - 1 / host_slowed)
//   in all      max(T, D)
//
// Both lines are linear in the keys of each column, as long as the keys that are moved cost the CPU the same. Sequences may
// have other numbers of queries; those that cost the CPU the most go first, which makes A linear between the ends of groups.
// Between two of these it is a linear program in two variables, whose optimum is where two of 13 lines meet: no column less
// than nothing, the ends of the stretch, the engines pairwise ending together, and the bus with the queries' coming. All are
// tried.
#pragma once

#include <cstdint>
#include <span>

namespace tandem {

// Keys that cost the CPU alike: of sequences with one number of queries.
struct PlanGroup {
  int64_t n_keys = 0;
  double host_ns = 0.0;  // of a key, on a CPU that is alone
};

// A way to the device. ns of a key, in all its KV heads.
struct PlanColumn {
  bool is_allowed = false;
  double bus_ns = 0.0;  // when the bus is alone
  double device_ns = 0.0;
};

enum PlanRoute : int32_t { kPlanStream, kPlanRecompute };
inline constexpr int32_t kPlanColumns = 2;

struct PlanRates {
  PlanColumn columns[kPlanColumns];
  bool host_is_allowed = true;
  double host_slowed = 1.0, bus_slowed = 1.0;  // while both are busy; below 1, what is found is good, not best
  double host_begin_ns = 0.0, bus_begin_ns = 0.0,
         device_begin_ns = 0.0;      // where there is anything to do at all, never ahead
  double bus_ahead_ns = 0.0;         // of the bus's work, at most, that is done when the queries come
  double rebuilt_end_ns = 0.0;       // where keys are made, bus_begin_ns in place of that; 0: nobody has said
  double rebuilt_host_end_ns = 0.0;  // what is added to host_begin_ns there
};

// host_ns, bus_ns: until each has ended, as slowed by the other. The bus's has what it does ahead, total_ns has not.
struct RoutePlan {
  int64_t host_keys = 0;
  int64_t moved_keys[kPlanColumns] = {};
  double host_ns = 0.0, bus_ns = 0.0, device_ns = 0.0, total_ns = 0.0;
  double seen_ns = 0.0;  // of total_ns, what the host can see: until the last key has crossed the bus

  int64_t n_moved() const { return moved_keys[kPlanStream] + moved_keys[kPlanRecompute]; }
};

// groups: by falling host_ns. The keys that move are the first of these.
RoutePlan plan_routes(std::span<const PlanGroup> groups, const PlanRates& rates);
// What a split that somebody else has chosen would take.
RoutePlan predict_routes(std::span<const PlanGroup> groups, const PlanRates& rates, double streamed, double recomputed);

}  // namespace tandem
