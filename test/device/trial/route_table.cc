// SPDX-License-Identifier: MIT
// lib/routes/route_table.cc with one more line.
#include "lib/pieces/route_line.h"
#include "lib/routes/recompute.h"
#include "lib/routes/stream.h"

namespace tandem {

Status make_refusing_route(const RouteSetup& setup, size_t idx, std::unique_ptr<KeyRoute>* route);

std::span<const RouteLine> route_table() {
  static constexpr RouteLine kRoutes[] = {
      {"stream", &StreamRoute::make},
      {"recompute", &RecomputeRoute::make},
      {"refusing", &make_refusing_route},
  };
  return kRoutes;
}

}  // namespace tandem
