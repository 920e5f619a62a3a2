// SPDX-License-Identifier: MIT
// The library's reports, read back.
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

// Query rows of a KV head from which the engine goes through matrix products, by what the report says.
struct MatmulRows {
  int64_t bf16 = 0;   // where q, K and V are bf16 and nothing is rotated
  int64_t other = 0;  // all else
};
Result matmul_rows_of(const Json& report, MatmulRows* rows);

// The device that an engine has opened.
struct EngineDevice {
  int32_t idx = 0;  // as tandem_tensor counts devices
  std::string name;
};
Result open_device_of(const Json& report, EngineDevice* device);

// The first member of that name, however deep; null where there is none.
Json find_member(const Json& json, const std::string& name);

}  // namespace tools
