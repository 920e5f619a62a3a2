// SPDX-License-Identifier: MIT
// All routes, in the order of the planner's columns (lib/routes/planner.h). A route that the planner has no column for is
// taken where a session asks for it.
#include <algorithm>
#include <array>

#include "lib/routes/recompute_route.h"
#include "lib/routes/stream.h"

namespace tandem {

namespace {

struct RouteLine {
  const char* name;  // as sessions ask for the route alone
  RouteMaker make;
};
constexpr RouteLine kRoutes[] = {
    {"stream", &StreamRoute::make},
    {"recompute", &RecomputeRoute::make},
};
static_assert(std::size(kRoutes) <= kMostRoutes);

template <typename T, T RouteLine::*member>
std::span<const T> column() {
  static const auto values = [] {
    std::array<T, std::size(kRoutes)> made{};
    std::transform(std::begin(kRoutes), std::end(kRoutes), made.begin(), [](const RouteLine& line) { return line.*member; });
    return made;
  }();
  return values;
}

}  // namespace

std::span<const char* const> route_names() { return column<const char*, &RouteLine::name>(); }
std::span<const RouteMaker> route_makers() { return column<RouteMaker, &RouteLine::make>(); }

}  // namespace tandem
