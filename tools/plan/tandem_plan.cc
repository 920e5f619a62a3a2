// SPDX-License-Identifier: MIT
// tandem-plan: shows the plans of tandem_plan_memory() and tandem_plan() before anything is allocated: the bytes of host and
// device memory that a cache with one session takes, and the processor that attends the keys outside the window.
#include <cstdio>

#include "tools/common/run_tool.h"
#include "tools/plan/memory_plan.h"

namespace tools {
namespace {

struct PlanCommand {
  Asked asked = Asked::kNothing;
  bool json = false;
  EngineFlags engine;
  PlanOptions plan;
};

std::vector<Flag> plan_flags(PlanCommand* command) {
  std::vector<Flag> flags;
  command->plan.declare(&flags);
  command->engine.declare(&flags);
  flags.push_back(switch_flag("--json", &command->json, "one JSON object instead of text"));
  declare_standard(&flags);
  return flags;
}

std::string plan_help() {
  PlanCommand command;
  return "tandem plan [flags]\n\n"
         "What a cache with one session will take of host and device memory, before anything is allocated; with --backend "
         "cuda\n"
         "also which processor attends the keys outside the window in the next call of a layer, and the time that takes by\n"
         "measurements of this machine. The route recompute is planned without weights: its memory, not its time. The exit "
         "code\n"
         "is 1 where a plan is over its cap.\n\n"
         "  tandem plan --model DIR --kv-len 131072 --kv-type q8_0\n"
         "  tandem plan --layers 32 --q-heads 32 --kv-heads 8 --head-dim 128 --kv-len 131072 --backend cuda --window "
         "8192\n\n" +
         flags_help(plan_flags(&command));
}

// fits: every planned length is within the caps.
Result plan_main(int argc, const char* const* argv, bool* fits) {
  PlanCommand command;
  std::vector<std::string> given;
  TOOL_TRY(parse_flags(plan_flags(&command), argc - 1, argv + 1, &command.asked, &given));
  if (command.asked != Asked::kNothing) return answer(command.asked, "tandem-plan", plan_help());
  TOOL_TRY(command.engine.check());
  TOOL_TRY(command.plan.check(given, command.engine));
  Engine engine;
  TOOL_TRY(command.engine.start(&engine));
  std::vector<PlannedLength> plans;
  TOOL_TRY(make_plans(engine.get(), command.plan, !command.engine.backend.empty(), &plans));
  for (const PlannedLength& planned : plans) *fits = *fits && planned.over_cap.empty();
  if (command.json) {
    Json json;
    TOOL_TRY(plans_json(command.plan, plans, &json));
    std::puts(json.dump().c_str());
  } else {
    std::fputs(plans_text(command.plan, plans).c_str(), stdout);
  }
  return {};
}

}  // namespace
}  // namespace tools

int main(int argc, char** argv) { return tools::run_tool("tandem-plan", argc, argv, tools::plan_main); }
