// SPDX-License-Identifier: MIT
// The library's reports, read back.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "tools/common/result.h"

namespace tools {

using Json = nlohmann::ordered_json;

Result engine_report(const tandem_engine* engine, Json* report);
Result plan_report(const tandem_memory_plan& plan, Json* report);

// The first member of that name, however deep; null where there is none.
Json find_member(const Json& json, const std::string& name);

}  // namespace tools
