// SPDX-License-Identifier: MIT
// tandem-info: what the library finds on this machine, and what a cache would take.
#include <cstdio>

#include "tools/common/engine_report.h"
#include "tools/common/handles.h"
#include "tools/common/run_tool.h"
#include "tools/info/build_versions.h"
#include "tools/info/info_options.h"
#include "tools/info/json_text.h"
#include "tools/plan/memory_plan.h"

namespace tools {
namespace {

Json instruction_sets(const Json& report) {
  Json available = Json::array(), missing = Json::array();
  for (int32_t idx = 0; const char* name = tandem_cpu_isa_name(idx); ++idx)
    (tandem_cpu_isa_available(name) ? available : missing).push_back(name);
  Json isa;
  isa["chosen"] = find_member(report, "isa");
  isa["available"] = available;
  isa["not_on_this_processor"] = missing;
  return isa;
}

Json policies() {
  Json names = Json::array();
  for (int32_t idx = 0; const char* name = tandem_policy_name(idx); ++idx) names.push_back(name);
  return names;
}

// fits: every planned length is within the cap.
Result info_main(int argc, const char* const* argv, bool* fits) {
  InfoOptions options;
  TOOL_TRY(parse_info_options(argc, argv, &options));
  if (options.asked != Asked::kNothing) return answer(options.asked, "tandem-info", info_help());
  Engine engine;
  TOOL_TRY(options.engine.start(&engine));
  Json report, info;
  TOOL_TRY(engine_report(engine.get(), &report));
  info["versions"] = build_versions();
  info["isa"] = instruction_sets(report);
  info["policies"] = policies();
  info["engine"] = report;

  std::vector<PlannedLength> plans;
  if (options.wants_plan) TOOL_TRY(make_plans(engine.get(), options.plan, !options.engine.backend.empty(), &plans));
  for (const PlannedLength& planned : plans) *fits = *fits && planned.over_cap.empty();
  if (options.json) {
    if (options.wants_plan) TOOL_TRY(plans_json(options.plan, plans, &info["plan"]));
    std::puts(info.dump().c_str());
    return {};
  }
  std::fputs(json_text(info).c_str(), stdout);
  if (options.wants_plan) std::printf("\n%s", plans_text(options.plan, plans).c_str());
  return {};
}

}  // namespace
}  // namespace tools

int main(int argc, char** argv) { return tools::run_tool("tandem-info", argc, argv, tools::info_main); }
