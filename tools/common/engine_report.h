// SPDX-License-Identifier: MIT
// Parses the library's reports.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "tools/common/result.h"

namespace tools {

using Json = nlohmann::ordered_json;

Result engine_report(const tandem_engine* engine, Json* report);
Result plan_report(const tandem_memory_plan& plan, Json* report);
Result route_report(const tandem_route_plan& plan, Json* report);

// Query rows of a KV head from which on the engine uses matrix products, from its report.
struct MatmulRows {
  int64_t bf16 = 0;   // if q, K and V are bf16 and nothing is rotated
  int64_t other = 0;  // in all other cases
};
Result matmul_rows_of(const Json& report, MatmulRows* rows);

// The device that an engine has opened.
struct EngineDevice {
  int32_t idx = 0;  // the index that tandem_tensor uses
  std::string name;
};
Result open_device_of(const Json& report, EngineDevice* device);

// Returns the first member of that name at any depth, or null.
Json find_member(const Json& json, const std::string& name);

}  // namespace tools
