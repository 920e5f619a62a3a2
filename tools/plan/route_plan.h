// SPDX-License-Identifier: MIT
// Which processor will attend keys outside the window in a call on device tensors, as the library plans it.
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

// The next call of a layer: sequences of kv_lens tokens, the last q_len of each new.
Result make_routes(tandem_session* session, const std::vector<int64_t>& kv_lens, int64_t q_len, PlannedRoutes* routes);
std::string routes_text(int64_t kv_len, int64_t q_len, const PlannedRoutes& routes);
Result routes_json(const PlannedRoutes& routes, Json* json);

}  // namespace tools
