// SPDX-License-Identifier: MIT
#include "tools/patterns/profile_options.h"

#include <algorithm>
#include <cstdio>

#include "tools/common/flags.h"
#include "tools/patterns/profile_pattern.h"

namespace tools {
namespace {

Flag pattern_flag(std::vector<tandem_head_pattern>* to) {
  return {"--pattern",
          "PATTERN",
          "a pattern, as a_shape=100/800; the flag may be there several times",
          "full, a_shape=SINKS/WINDOW, vertical_slash=COLUMNS/DIAGONALS, block_sparse=BLOCKS, or several of these with +",
          [to](const std::string& value) {
            tandem_head_pattern pattern;
            if (!parse_pattern(value, &pattern)) return Stored::kNotAValue;
            add_distinct(to, pattern);
            return Stored::kYes;
          },
          {},
          true};
}

Flag shape_flag(ProfileLayer* layer) {
  return {"--shape", "QxKVxDIM", "query heads / KV heads x dimensions of a head (32/8x128)",
          "query heads/KV heads x dimensions from 1 to 4096, as 32/8x128, with KV heads that divide the query heads",
          [layer](const std::string& value) {
            int q_heads = 0, kv_heads = 0, dim = 0, n_read = 0;
            const bool is_shape = value.size() <= 14 &&
                                  std::sscanf(value.c_str(), "%4d/%4dx%4d%n", &q_heads, &kv_heads, &dim, &n_read) == 3 &&
                                  n_read == static_cast<int>(value.size());
            if (!is_shape) return Stored::kNotAValue;
            if (std::min({q_heads, kv_heads, dim}) < 1 || std::max({q_heads, kv_heads, dim}) > 4096)
              return Stored::kOutOfRange;
            if (q_heads % kv_heads != 0) return Stored::kOutOfRange;
            layer->n_q_heads = q_heads, layer->n_kv_heads = kv_heads, layer->head_dim = dim;
            return Stored::kYes;
          }};
}

std::vector<Flag> profile_flags(ProfileOptions* options) {
  ProfileLayer* layer = &options->layer;
  std::vector<Flag> flags = {
      pattern_flag(&options->patterns),
      numbers_flag("--lengths", &options->lengths, 2, INT32_MAX,
                   "keys that the last query sees, its own included (8192,32768,131072)"),
      number_flag("--chunk", &layer->chunk, 2, 1 << 20, "queries of the append that is timed (8192)"),
      shape_flag(layer),
      choice_flag("--kv-type", &layer->kv_type, key_type_choices(), "storage type of K and V (bf16)"),
      choice_flag("--io-type", &layer->io_type, {{"f32", TANDEM_F32}, {"bf16", TANDEM_BF16}}, "type of q, k, v, o (bf16)"),
      number_flag("--repeats", &layer->repeats, 1, 100000, "timed calls of each pattern and length; the median counts (3)"),
      text_flag("--out", "FILE", &options->out, "the profile, as JSON; it is written anew after every row"),
      switch_flag("--append", &options->append, "keep the rows of --out and measure the missing ones alone"),
      text_flag("--svg", "FILE", &options->svg, "a picture of time by length, a line for each pattern"),
      text_flag("--from", "FILE", &options->from, "measure nothing: read this profile, for --at and --svg"),
      numbers_flag("--at", &options->at, 1, INT32_MAX, "print the times of these lengths, between those that were measured"),
      switch_flag("--json", &options->json, "a JSON line for each row instead of a table"),
  };
  layer->engine.declare(&flags);
  declare_standard(&flags);
  return flags;
}

// Checks the flags of a profile that is read.
Result check_reading(const ProfileOptions& options, const std::vector<std::string>& given) {
  static const std::vector<std::string> kOfReading = {"--from", "--at", "--svg", "--json", "--pattern"};
  if (!options.heads_path.empty())
    return usage_error("\"%s\": with --from the patterns are given by --pattern", options.heads_path.c_str());
  for (const std::string& name : given)
    if (std::find(kOfReading.begin(), kOfReading.end(), name) == kOfReading.end())
      return usage_error("%s: --from = %s measures nothing", name.c_str(), options.from.c_str());
  if (options.at.empty() && options.svg.empty())
    return usage_error("--from = %s: --at or --svg is missing", options.from.c_str());
  return {};
}

Result check_measuring(ProfileOptions* given) {
  if (given->layer.engine.backend == "cpu") given->layer.engine.backend.clear();
  TOOL_TRY(given->layer.engine.check());
  const ProfileOptions& options = *given;
  if (!options.at.empty()) return usage_error("--at = %lld: --from is missing", static_cast<long long>(options.at.front()));
  if (options.append && options.out.empty()) return usage_error("--append: --out is missing");
  for (const int64_t length : options.lengths)
    if (length < options.layer.chunk)
      return usage_error("--lengths = %lld is less than --chunk = %lld: a query is one of the keys",
                         static_cast<long long>(length), static_cast<long long>(options.layer.chunk));
  return {};
}

}  // namespace

Result parse_profile_options(int argc, const char* const* argv, ProfileOptions* options) {
  const bool has_path = argc > 1 && argv[1][0] != '-';
  if (has_path) options->heads_path = argv[1];
  const int n_read = has_path ? 2 : 1;
  std::vector<std::string> given;
  TOOL_TRY(parse_flags(profile_flags(options), argc - n_read, argv + n_read, &options->asked, &given));
  if (options->asked != Asked::kNothing) return {};
  std::sort(options->lengths.begin(), options->lengths.end());
  options->lengths.erase(std::unique(options->lengths.begin(), options->lengths.end()), options->lengths.end());
  return options->from.empty() ? check_measuring(options) : check_reading(*options, given);
}

std::string profile_help() {
  ProfileOptions options;
  return "tandem patterns profile [FILE] [flags]\n"
         "tandem patterns profile --from PROFILE --at N[,N...] [--pattern PATTERN] [--svg FILE]\n\n"
         "Measures what one append of --chunk queries takes at the end of a sequence, in one layer whose query heads all "
         "have\n"
         "the same pattern: the whole call, with the search for the keys in it. The patterns are those of FILE, a file of "
         "head\n"
         "patterns, and of --pattern, each once; full is always measured. Repeats of the patterns take turns. With "
         "--backend "
         "cuda\n"
         "calls are on tensors in the memory of a GPU; without, or with --backend cpu, on those of the host. Ctrl-C ends "
         "the\n"
         "program; rows of the lengths that are complete are in --out. With --from the program prints times between "
         "measured\n"
         "lengths (linear in the length) and refuses lengths outside them.\n\n"
         "  tandem patterns profile patterns.json --out profile.json --svg profile.svg\n"
         "  tandem patterns profile --pattern a_shape=100/800 --pattern vertical_slash=30/800 --lengths 8192,32768\n"
         "  tandem patterns profile patterns.json --backend cuda --out gpu.json\n"
         "  tandem patterns profile --from profile.json --at 65536\n\n" +
         flags_help(profile_flags(&options));
}

}  // namespace tools
