// SPDX-License-Identifier: MIT
// The table of routes, for users that need only names and factories.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "lib/base/status.h"

namespace tandem {

class KeyRoute;
struct RouteSetup;

struct RouteLine {
  const char* name;  // the name by which sessions ask for this route alone
  // Leaves *route null if the session cannot use the route. Returns an error only if the session asked for it.
  Status (*make)(const RouteSetup& setup, size_t idx, std::unique_ptr<KeyRoute>* route);
};
std::span<const RouteLine> route_table();  // lib/routes/route_table.cc

}  // namespace tandem
