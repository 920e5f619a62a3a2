// SPDX-License-Identifier: MIT
// The options of tandem-info.
#pragma once

#include <string>

#include "tools/common/engine_flags.h"
#include "tools/plan/plan_options.h"

namespace tools {

struct InfoOptions {
  Asked asked = Asked::kNothing;
  bool json = false;
  bool wants_plan = false;
  EngineFlags engine;
  PlanOptions plan;
};

Result parse_info_options(int argc, const char* const* argv, InfoOptions* options);
std::string info_help();

}  // namespace tools
