// SPDX-License-Identifier: MIT
// tandem-patterns: shows the content of a file of head patterns as tandem_patterns_read() reads it, starts the search that
// makes such a file, and measures the times of patterns.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "examples/generate/nearest_name.h"
#include "tools/common/flags.h"
#include "tools/common/run_tool.h"
#include "tools/patterns/pattern_profile.h"
#include "tools/patterns/pattern_search.h"
#include "tools/patterns/pattern_show.h"

namespace tools {
namespace {

struct PatternsCommand {
  Asked asked = Asked::kNothing;
  bool json = false;
  std::string path, svg;
  tandem_pattern_file_options options = TANDEM_PATTERN_FILE_OPTIONS_INIT;
};

std::vector<Flag> patterns_flags(PatternsCommand* command) {
  tandem_pattern_file_options* options = &command->options;
  std::vector<Flag> flags = {
      number_flag("--group-size", &options->group_size, 1, 4096, "gates: query heads of a KV head (1)"),
      real_flag("--threshold", &options->threshold, 0, 1e6, "gates: heads are full from this gate on (the file's median)"),
      number_flag("--sink-tokens", &options->sink_tokens, 0, INT32_MAX, "gates: first tokens of the other heads (128)"),
      number_flag("--window-tokens", &options->window_tokens, 1, INT32_MAX, "gates: newest tokens of the other heads (256)"),
      text_flag("--svg", "OUT", &command->svg, "draw the picture into this file, too"),
      switch_flag("--json", &command->json, "one JSON object instead of text"),
  };
  declare_standard(&flags);
  return flags;
}

std::string patterns_help() {
  PatternsCommand command;
  return "tandem patterns show FILE [flags]\n"
         "tandem patterns search MODEL --text FILE --out FILE.json [flags]\n"
         "tandem patterns profile [FILE] [--pattern a_shape=100/800 ...] [--out PROFILE] [flags]\n\n"
         "show: which keys each head attends under the policy \"patterns\" with this file: a table by layer, and a picture "
         "of "
         "one letter\n"
         "a head. FILE is JSON as MInference publishes it, or gates as DuoAttention publishes them, which some flags are "
         "for.\n"
         "search: finds patterns for the heads of a model within a budget, by Tandem's Python package; search --help lists "
         "its flags.\n"
         "profile: measures what an append takes, by pattern and length; profile --help lists its flags.\n\n"
         "  tandem patterns show patterns.json\n"
         "  tandem patterns show gates.tsv --group-size 4 --threshold 0.5\n"
         "  tandem patterns search MODEL --text FILE --contexts 8192 --budget 0.33 --out patterns.json\n"
         "  tandem patterns profile patterns.json --out profile.json\n\n"
         "Flags of show:\n\n" +
         flags_help(patterns_flags(&command));
}

// Distinguishes JSON from gates by the first character, as the library does. For a file that cannot be read the library
// reports the error.
bool is_json(const std::string& path) {
  std::ifstream file(path);
  char first = 0;
  return std::filesystem::is_regular_file(path) && file >> first && (first == '[' || first == '{');
}

// Parses "show FILE flags...", or help.
Result parse_command(int argc, const char* const* argv, PatternsCommand* command) {
  const std::vector<Flag> flags = patterns_flags(command);
  command->asked = asked_by(flags, argc - 1, argv + 1);
  if (command->asked != Asked::kNothing) return {};
  if (argc < 2) return usage_error("what to do is missing: show FILE, search MODEL or profile (--help tells more)");
  const std::string first = argv[1];
  if (first != "show")
    return usage_error("\"%s\" is none of show, search and profile%s: tandem patterns show FILE", first.c_str(),
                       generate::did_you_mean(first, {"show", "search", "profile"}).c_str());
  const bool has_path = argc > 2 && argv[2][0] != '-';
  if (has_path) command->path = argv[2];
  const int n_read = has_path ? 3 : 2;
  std::vector<std::string> given;
  TOOL_TRY(parse_flags(flags, argc - n_read, argv + n_read, &command->asked, &given));
  if (command->path.empty()) return usage_error("show needs a file, in front of its flags");
  static const std::vector<std::string> kOfGates = {"--group-size", "--threshold", "--sink-tokens", "--window-tokens"};
  for (const std::string& name : given)
    if (std::find(kOfGates.begin(), kOfGates.end(), name) != kOfGates.end() && is_json(command->path))
      return refuse("%s is for gates, and %s is JSON", name.c_str(), command->path.c_str());
  return {};
}

Result write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text << std::flush;
  return file.good() ? Result() : refuse("--svg = %s cannot be written", path.c_str());
}

Result patterns_main(int argc, const char* const* argv, bool*) {
  if (argc > 1 && std::string(argv[1]) == "search") {
    if (argc > 2 && std::string(argv[2]) == "--version") return answer(Asked::kVersion, "tandem-patterns", "");
    return run_pattern_search(argc, argv);
  }
  if (argc > 1 && std::string(argv[1]) == "profile") return run_pattern_profile(argc, argv);
  PatternsCommand command;
  TOOL_TRY(parse_command(argc, argv, &command));
  if (command.asked != Asked::kNothing) return answer(command.asked, "tandem-patterns", patterns_help());
  PatternHeads heads;
  TOOL_TRY(read_heads(command.path, command.options, &heads));
  if (!command.svg.empty()) TOOL_TRY(write_file(command.svg, patterns_svg(heads)));
  if (command.json)
    std::puts(patterns_json(heads).dump().c_str());
  else
    std::fputs(patterns_text(heads).c_str(), stdout);
  return {};
}

}  // namespace
}  // namespace tools

int main(int argc, char** argv) { return tools::run_tool("tandem-patterns", argc, argv, tools::patterns_main); }
