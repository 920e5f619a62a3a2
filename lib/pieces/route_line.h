// SPDX-License-Identifier: MIT
// The table of routes, as those see it who need names or makers alone.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "lib/base/status.h"

namespace tandem {

class KeyRoute;
struct RouteSetup;

struct RouteLine {
  const char* name;  // as sessions ask for the route alone
  // Leaves null where the session cannot use the route. Errors are those of sessions that asked for it.
  Status (*make)(const RouteSetup& setup, size_t idx, std::unique_ptr<KeyRoute>* route);
};
std::span<const RouteLine> route_table();  // lib/routes/route_table.cc

}  // namespace tandem
