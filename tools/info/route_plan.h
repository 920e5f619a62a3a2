// SPDX-License-Identifier: MIT
// Who will compute over keys outside the window in decode calls on a device, as the library plans it.
#pragma once

#include <string>
#include <vector>

#include "tools/common/engine_report.h"

namespace tools {

// Of one layer.
struct PlannedRoutes {
  tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
  std::string reason;  // the library's, where there is no plan
};

Result make_routes(tandem_session* session, const std::vector<int64_t>& kv_lens, PlannedRoutes* routes);
std::string routes_text(int64_t kv_len, const PlannedRoutes& routes);
Result routes_json(const PlannedRoutes& routes, Json* json);

}  // namespace tools
