// SPDX-License-Identifier: MIT
// Plans the memory of a cache with one session, per tier, by the library.
#pragma once

#include <string>
#include <vector>

#include "tools/common/engine_report.h"
#include "tools/plan/plan_options.h"
#include "tools/plan/route_plan.h"

namespace tools {

struct PlannedLength {
  int64_t kv_len = 0;
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  std::string over_cap;  // the library's reason; empty: the plan fits
  bool has_routes = false;
  PlannedRoutes routes;
};

// with_routes: the engine has a device. Plans its routes, too.
Result make_plans(tandem_engine* engine, const PlanOptions& options, bool with_routes, std::vector<PlannedLength>* plans);
std::string plans_text(const PlanOptions& options, const std::vector<PlannedLength>& plans);
Result plans_json(const PlanOptions& options, const std::vector<PlannedLength>& plans, Json* json);

}  // namespace tools
