// SPDX-License-Identifier: MIT
// What a cache with one session will take, per tier, as the library plans it.
#pragma once

#include <string>
#include <vector>

#include "tools/common/engine_report.h"
#include "tools/info/info_options.h"
#include "tools/info/route_plan.h"

namespace tools {

struct PlannedLength {
  int64_t kv_len = 0;
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  std::string over_cap;  // the library's reason; empty: fits
  PlannedRoutes routes;  // with a backend
};

Result make_plans(tandem_engine* engine, const InfoOptions& options, std::vector<PlannedLength>* plans);
std::string plans_text(const InfoOptions& options, const std::vector<PlannedLength>& plans);
Result plans_json(const InfoOptions& options, const std::vector<PlannedLength>& plans, Json* json);

}  // namespace tools
