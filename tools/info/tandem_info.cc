// SPDX-License-Identifier: MIT
// tandem-info: shows what the library finds on this machine, and the memory that a cache would need.
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

// Sets *failed to the reason if the backend does not work. Then starts an engine without the backend, so that everything
// else is still shown.
Result start_engine(const EngineFlags& flags, Engine* engine, Result* failed) {
  *failed = flags.start(engine);
  if (failed->ok() || flags.backend.empty()) return *failed;
  EngineFlags on_cpu = flags;
  on_cpu.backend.clear();
  on_cpu.backend_path.clear();
  return on_cpu.start(engine);
}

// Replaces "not asked for" in the list of backends.
void add_failed_backend(const std::string& name, const std::string& reason, Json* report) {
  const Json failed = {{"name", name}, {"state", "failed"}, {"reason", reason}};
  Json& backends = (*report)["backends"];
  for (Json& backend : backends)
    if (backend.value("name", "") == name) {
      backend = failed;
      return;
    }
  backends.push_back(failed);
}

// fits: every planned length is within the cap.
Result add_plan(const InfoOptions& options, const Engine& engine, Json* info, std::string* as_text, bool* fits) {
  std::vector<PlannedLength> plans;
  TOOL_TRY(make_plans(engine.get(), options.plan, !options.engine.backend.empty(), &plans));
  for (const PlannedLength& planned : plans) *fits = *fits && planned.over_cap.empty();
  if (options.json) return plans_json(options.plan, plans, &(*info)["plan"]);
  *as_text = text("\n%s", plans_text(options.plan, plans).c_str());
  return {};
}

Result info_main(int argc, const char* const* argv, bool* fits) {
  InfoOptions options;
  TOOL_TRY(parse_info_options(argc, argv, &options));
  if (options.asked != Asked::kNothing) return answer(options.asked, "tandem-info", info_help());
  Engine engine;
  Result backend;
  TOOL_TRY(start_engine(options.engine, &engine, &backend));
  Json report, info;
  TOOL_TRY(engine_report(engine.get(), &report));
  if (!backend.ok()) add_failed_backend(options.engine.backend, backend.message(), &report);
  info["versions"] = build_versions();
  info["isa"] = instruction_sets(report);
  info["policies"] = policies();
  info["engine"] = report;
  std::string plan;
  // Without a working backend the plan would be for another machine than requested.
  if (options.wants_plan && backend.ok()) TOOL_TRY(add_plan(options, engine, &info, &plan, fits));
  std::fputs(options.json ? (info.dump() + "\n").c_str() : (json_text(info) + plan).c_str(), stdout);
  TOOL_TRY(flush_stdout());
  return backend;
}

}  // namespace
}  // namespace tools

int main(int argc, char** argv) { return tools::run_tool("tandem-info", argc, argv, tools::info_main); }
