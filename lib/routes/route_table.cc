// SPDX-License-Identifier: MIT
// All routes, in the order of the planner's columns (lib/rates/planner.h). A route without a column is used only if a
// session asks for it.
#include "lib/pieces/route_line.h"
#include "lib/routes/recompute.h"
#include "lib/routes/stream.h"

namespace tandem {

std::span<const RouteLine> route_table() {
  static constexpr RouteLine kRoutes[] = {
      {"stream", &StreamRoute::make},
      {"recompute", &RecomputeRoute::make},
  };
  static_assert(std::size(kRoutes) <= kMostRoutes);
  return kRoutes;
}

}  // namespace tandem
