// SPDX-License-Identifier: MIT
#include "tools/info/info_options.h"

#include <algorithm>

namespace tools {
namespace {

std::vector<Flag> info_flags(InfoOptions* options) {
  std::vector<Flag> flags = {switch_flag("--json", &options->json, "one JSON object instead of text")};
  options->engine.declare(&flags);
  flags.push_back(switch_flag("--plan", &options->wants_plan, "also what tandem plan prints, with its flags"));
  declare_standard(&flags);
  return flags;
}

// Refuses flags that would change nothing.
Result check_used(const std::vector<std::string>& given, const std::vector<Flag>& plan_flags) {
  for (const Flag& flag : plan_flags)
    if (std::find(given.begin(), given.end(), flag.name) != given.end())
      return usage_error("%s is about the memory plan: --plan is missing", flag.name.c_str());
  return {};
}

}  // namespace

Result parse_info_options(int argc, const char* const* argv, InfoOptions* options) {
  std::vector<Flag> flags = info_flags(options), plan_flags;
  options->plan.declare(&plan_flags);
  flags.insert(flags.end(), plan_flags.begin(), plan_flags.end());
  std::vector<std::string> given;
  TOOL_TRY(parse_flags(flags, argc - 1, argv + 1, &options->asked, &given));
  if (options->asked != Asked::kNothing) return {};
  if (!options->wants_plan) TOOL_TRY(check_used(given, plan_flags));
  TOOL_TRY(options->engine.check());
  return options->plan.check(given, options->engine);
}

std::string info_help() {
  InfoOptions options;
  return "tandem info [flags]\n\n"
         "What the library finds on this machine: versions, topology, workers, instruction sets, backends.\n\n" +
         flags_help(info_flags(&options));
}

}  // namespace tools
