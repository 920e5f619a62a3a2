// SPDX-License-Identifier: MIT
// Plans by the library which processor will attend the keys outside the window in a call on device tensors.
#pragma once

#include <string>
#include <vector>

#include "tools/common/engine_report.h"

namespace tools {

// The routes of one layer.
struct PlannedRoutes {
  tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
  std::string reason;  // the library's reason if it makes no plan
};

// Plans the next call of a layer: sequences of kv_lens tokens, of which the last q_len are new.
Result make_routes(tandem_session* session, const std::vector<int64_t>& kv_lens, int64_t q_len, PlannedRoutes* routes);
std::string routes_text(int64_t kv_len, int64_t q_len, const PlannedRoutes& routes);
Result routes_json(const PlannedRoutes& routes, Json* json);

}  // namespace tools
