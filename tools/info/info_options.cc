// SPDX-License-Identifier: MIT
#include "tools/info/info_options.h"

#include <algorithm>
#include <filesystem>

#include "tools/common/flags.h"
#include "tools/info/model_config.h"

namespace tools {
namespace {

struct RawChoices {
  int32_t policy = -1;
  int32_t isa = -1;
};

std::vector<Flag> info_flags(InfoOptions* options, RawChoices* raw) {
  constexpr int64_t kMaxLen = INT64_C(1) << 40;
  return {
      switch_flag("--json", &options->json, "one JSON object instead of text"),
      number_flag("--threads", &options->threads, 0, 4096, "CPU workers (0: affinity mask and quota decide)"),
      choice_flag("--isa", &raw->isa, library_choices(tandem_cpu_isa_name), "instruction set (the best there is)"),
      text_flag("--backend", "NAME", &options->backend, "also a device backend, by its name: cuda (none)"),
      text_flag("--backend-path", "FILE", &options->backend_path, "its module (looked for by the library)"),
      switch_flag("--plan", &options->plan, "also the memory that a cache with one session will take"),
      text_flag("--model", "DIR", &options->model_dir,
                "geometry from DIR/config.json (Hugging Face), instead of the four below"),
      number_flag("--layers", &options->n_layers, 1, 65536, "layers (32)"),
      number_flag("--q-heads", &options->n_q_heads, 1, 4096, "query heads (32)"),
      number_flag("--kv-heads", &options->n_kv_heads, 1, 4096, "KV heads, a divisor of the query heads (8)"),
      number_flag("--head-dim", &options->head_dim, 1, 4096, "dimensions of a key (128)"),
      number_flag("--v-head-dim", &options->v_head_dim, 1, 4096, "dimensions of a value (those of a key)"),
      switch_flag("--v-aliases-k", &options->v_aliases_k,
                  "a value is the first dimensions of its key, as with MLA: 576 and 512"),
      numbers_flag("--kv-len", &options->kv_lens, 0, kMaxLen, "tokens of a sequence, a plan for each (32768,131072)"),
      number_flag("--batch", &options->batch, 1, 1 << 20, "sequences of that length (1)"),
      choice_flag("--kv-type", &options->kv_type, dtype_choices(), "storage type of K and V (bf16)"),
      choice_flag("--v-type", &options->v_type, dtype_choices(), "storage type of V where it differs"),
      number_flag("--page-tokens", &options->page_tokens, 16, 4096, "tokens of a page, a power of two (128)"),
      choice_flag("--policy", &raw->policy, library_choices(tandem_policy_name), "which keys are attended (all)"),
      number_flag("--window", &options->window, 0, kMaxLen, "newest tokens always attended (4096)"),
      number_flag("--sinks", &options->sinks, 0, kMaxLen, "first tokens always attended (64)"),
      real_flag("--host-cap-gib", &options->host_cap_gib, 1e-6, 1e6, "refuse plans that take more host memory (no cap)"),
      switch_flag("--help", &options->help, "this text"),
  };
}

// Flags that would change nothing are refused.
Result check_used(const std::vector<std::string>& given, const InfoOptions& options) {
  const auto is_given = [&](const char* name) { return std::find(given.begin(), given.end(), name) != given.end(); };
  constexpr const char* kOfThePlan[] = {
      "--model",  "--layers",      "--q-heads", "--kv-heads",   "--head-dim", "--kv-len",       "--batch",       "--kv-type",
      "--policy", "--page-tokens", "--window",  "--v-head-dim", "--sinks",    "--host-cap-gib", "--v-aliases-k", "--v-type"};
  constexpr const char* kOfTheModel[] = {"--layers", "--q-heads", "--kv-heads", "--head-dim"};
  for (const char* name : kOfThePlan)
    if (is_given(name) && !options.plan) return refuse("%s is about the memory plan: --plan is missing", name);
  for (const char* name : kOfTheModel)
    if (is_given(name) && !options.model_dir.empty())
      return refuse("%s contradicts --model = %s, whose config.json says that", name, options.model_dir.c_str());
  return {};
}

}  // namespace

Result parse_info_options(int argc, const char* const* argv, InfoOptions* options) {
  RawChoices raw;
  std::vector<std::string> given;
  TOOL_TRY(parse_flags(info_flags(options, &raw), argc - 1, argv + 1, &given));
  if (options->help) return {};
  TOOL_TRY(check_used(given, *options));
  if (raw.policy >= 0) options->policy = tandem_policy_name(raw.policy);
  if (raw.isa >= 0) options->isa = tandem_cpu_isa_name(raw.isa);
  if (!options->isa.empty() && !tandem_cpu_isa_available(options->isa.c_str()))
    return refuse("--isa = %s: this processor does not have it", options->isa.c_str());
  if (!options->backend_path.empty()) options->backend_path = std::filesystem::absolute(options->backend_path);
  if (options->kv_lens.empty()) options->kv_lens = {32768, 131072};
  if (options->kv_type == 0) options->kv_type = TANDEM_BF16;
  if (options->v_type == 0) options->v_type = options->kv_type;
  if (!options->model_dir.empty()) TOOL_TRY(read_model_config(options->model_dir, options));
  if (options->v_head_dim == 0) options->v_head_dim = options->head_dim;
  if (options->n_q_heads % options->n_kv_heads != 0)
    return refuse("--q-heads = %lld is not a multiple of --kv-heads = %lld", static_cast<long long>(options->n_q_heads),
                  static_cast<long long>(options->n_kv_heads));
  return {};
}

std::string info_help() {
  InfoOptions options;
  RawChoices raw;
  return "tandem-info [flags]\n\n"
         "What the library finds on this machine: versions, topology, workers, instruction sets, backends; with --plan "
         "also\n"
         "what a cache would take, per tier, before anything is allocated.\n\n" +
         flags_help(info_flags(&options, &raw));
}

}  // namespace tools
