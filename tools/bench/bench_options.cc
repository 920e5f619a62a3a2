// SPDX-License-Identifier: MIT
#include "tools/bench/bench_options.h"

#include "examples/generate/nearest_name.h"
#include "tools/common/flags.h"

namespace tools {
namespace {

constexpr Choice kModes[] = {{"decode", static_cast<int32_t>(Mode::kDecode)},
                             {"append", static_cast<int32_t>(Mode::kAppend)},
                             {"prefill", static_cast<int32_t>(Mode::kPrefill)},
                             {"wake", static_cast<int32_t>(Mode::kWake)}};

struct RawChoices {
  int32_t policy = -1;
  int32_t isa = -1;
  int32_t output = static_cast<int32_t>(Output::kMarkdown);
};

std::vector<Flag> bench_flags(BenchOptions* options, RawChoices* raw) {
  constexpr int64_t kMaxLen = INT32_MAX;
  std::vector<Flag> flags = {
      number_flag("--q-heads", &options->n_q_heads, 1, 4096, "query heads (32)"),
      number_flag("--kv-heads", &options->n_kv_heads, 1, 4096, "KV heads, a divisor of the query heads (8)"),
      number_flag("--head-dim", &options->head_dim, 1, 4096, "dimensions of a key (128)"),
      number_flag("--v-head-dim", &options->v_head_dim, 1, 4096, "dimensions of a value (those of a key)"),
      switch_flag("--v-aliases-k", &options->v_aliases_k,
                  "a value is the first dimensions of its key, as with MLA: 576 and 512"),
      real_flag("--rope-theta", &options->rope_theta, 0, 1e12,
                "base of RoPE's frequencies, which the library applies at attend time (0: keys come rotated)"),
      numbers_flag(
          "--kv-len", &options->kv_lens, 1, kMaxLen,
          "keys that the last query sees, its own included (decode 32768,131072; append, prefill 8192; wake 1,64,512)"),
      number_flag("--q-len", &options->q_len, 1, 1 << 20, "queries of a call (append 32, prefill 512)"),
      choices_flag("--kv-type", &options->kv_types, key_type_choices(), "storage types of K and V (bf16)"),
      choice_flag("--v-type", &options->v_type, key_type_choices(), "storage type of V where it differs"),
      choice_flag("--k-rotation", &options->k_rotation,
                  {{"none", TANDEM_ROTATION_NONE}, {"hadamard", TANDEM_ROTATION_HADAMARD}},
                  "rotation of keys before they are stored (hadamard for 4-bit types, else none)"),
      number_flag("--page-tokens", &options->page_tokens, 16, 4096, "tokens of a page, a power of two (128)"),
      choice_flag("--io-type", &options->io_type, {{"f32", TANDEM_F32}, {"bf16", TANDEM_BF16}}, "type of q, k, v, o (bf16)"),
      number_flag("--layers", &options->n_layers, 0, 65536, "layers taken in turns (0: until K and V leave the caches)"),
      number_flag("--batch", &options->batch, 1, 4096, "sequences of a call (1)"),
      switch_flag("--ragged", &options->ragged,
                  "sequences of different lengths, --kv-len being their mean: the i-th of n has (2 i - 1) / n of it"),
      choice_flag("--policy", &raw->policy, library_choices(tandem_policy_name), "which keys are attended (all)"),
      text_flag("--patterns", "FILE", &options->patterns.path, "patterns, which needs it: a file of head patterns"),
      number_flag("--pattern-layer", &options->patterns.layer_idx, 0, 65535,
                  "layer of that file, whose patterns all layers here have (0)"),
      number_flag("--window", &options->window, 0, kMaxLen, "newest tokens always attended, streaming and hgca (4096)"),
      number_flag("--sinks", &options->sinks, 0, kMaxLen, "first tokens always attended, streaming and hgca (64)"),
      real_flag("--alpha", &options->alpha, 1e-6, 1, "factor of the moving average, hgca (0.3)"),
      real_flag("--beta", &options->beta, 0, 1e6, "threshold factor, hgca (1)"),
      number_flag("--threads", &options->threads, 0, 4096, "CPU workers (0: affinity mask and quota decide)"),
      number_flag("--repeats", &options->repeats, 1, 100000, "timed steps over all layers (30)"),
      switch_flag("--interleave", &options->interleave,
                  "a step of each type and length in turns, all of them in memory, instead of one case after the other"),
      number_flag("--probe-mib", &options->probe_mib, 0, 1 << 20,
                  "buffer of the read bandwidth's measurement (0: 16 last-level caches; fewer measure the caches)"),
      choice_flag("--isa", &raw->isa, library_choices(tandem_cpu_isa_name), "instruction set (the best there is)"),
      choice_flag("--output", &raw->output,
                  {{"md", static_cast<int32_t>(Output::kMarkdown)},
                   {"csv", static_cast<int32_t>(Output::kCsv)},
                   {"json", static_cast<int32_t>(Output::kJson)}},
                  "form of the results (md)"),
  };
  declare_standard(&flags);
  return flags;
}

void fill_defaults(BenchOptions* options) {
  if (options->kv_lens.empty()) {
    if (options->mode == Mode::kDecode)
      options->kv_lens = {32768, 131072};
    else if (options->mode == Mode::kWake)
      options->kv_lens = {1, 64, 512};
    else
      options->kv_lens = {8192};
  }
  if (options->kv_types.empty()) options->kv_types = {TANDEM_BF16};
  if (options->io_type == 0) options->io_type = TANDEM_BF16;
  if (options->v_head_dim == 0) options->v_head_dim = options->head_dim;
  if (options->q_len == 0) options->q_len = options->mode == Mode::kAppend ? 32 : options->mode == Mode::kPrefill ? 512 : 1;
}

// Checks that the flags fit together.
Result check_together(const BenchOptions& options) {
  const auto number = [](int64_t value) { return static_cast<long long>(value); };
  if (options.n_q_heads % options.n_kv_heads != 0)
    return usage_error("--q-heads = %lld is not a multiple of --kv-heads = %lld", number(options.n_q_heads),
                       number(options.n_kv_heads));
  if (options.q_len != 1 && (options.mode == Mode::kDecode || options.mode == Mode::kWake))
    return usage_error("--q-len = %lld: %s has one query per sequence (append and prefill have more)", number(options.q_len),
                       options.mode_name.c_str());
  if (options.policy == "hip")
    return usage_error("--policy hip: is not timed here (the tree's bench/api/pruning_bench does)");
  for (const int64_t kv_len : options.kv_lens) {
    if (options.ragged && kv_len % options.batch != 0)
      return usage_error("--kv-len = %lld is not a multiple of --batch = %lld, as --ragged needs", number(kv_len),
                         number(options.batch));
    if (options.ragged && kv_len / options.batch < options.q_len)
      return usage_error(
          "--kv-len = %lld: the shortest of --batch = %lld ragged sequences has less than --q-len = %lld keys",
          number(kv_len), number(options.batch), number(options.q_len));
    if (kv_len < options.q_len)
      return usage_error("--kv-len = %lld is less than --q-len = %lld: a query is one of the keys", number(kv_len),
                         number(options.q_len));
  }
  if (!options.isa.empty() && !tandem_cpu_isa_available(options.isa.c_str()))
    return refuse("--isa = %s: this processor does not have it", options.isa.c_str());
  return {};
}

// Refuses flags that would change nothing.
Result check_used(const std::vector<std::string>& given, const BenchOptions& options) {
  const std::string& policy = options.policy;
  if (policy != "patterns")
    TOOL_TRY(refuse_given(given, {"--patterns", "--pattern-layer"}, "is for --policy patterns alone"));
  if (policy != "hgca") TOOL_TRY(refuse_given(given, {"--alpha", "--beta"}, "is for --policy hgca alone"));
  if (policy != "hgca" && policy != "streaming")
    TOOL_TRY(refuse_given(given, {"--window", "--sinks"}, "is for --policy streaming and hgca alone"));
  if (options.batch == 1) TOOL_TRY(refuse_given(given, {"--ragged"}, "needs --batch: one sequence has the mean length"));
  if (options.mode == Mode::kWake) return refuse_given(given, {"--probe-mib"}, "is unused in wake, which has no limit");
  return {};
}

Result read_patterns(BenchOptions* options) {
  if (options->policy != "patterns") return {};
  if (options->patterns.path.empty()) return usage_error("--policy = patterns: --patterns FILE is missing");
  return read_bench_patterns({options->n_q_heads, options->n_kv_heads}, &options->patterns);
}

}  // namespace

Result parse_bench_options(int argc, const char* const* argv, BenchOptions* options) {
  RawChoices raw;
  const std::vector<Flag> flags = bench_flags(options, &raw);
  options->asked = asked_by(flags, argc - 1, argv + 1);
  if (options->asked != Asked::kNothing) return {};
  if (argc < 2) return usage_error("what to measure is missing: decode, append, prefill or wake (--help tells more)");
  options->mode_name = argv[1];
  bool known = false;
  for (const Choice& mode : kModes) {
    if (options->mode_name != mode.name) continue;
    options->mode = static_cast<Mode>(mode.value);
    known = true;
  }
  if (!known) {
    std::vector<std::string> names;
    for (const Choice& mode : kModes) names.emplace_back(mode.name);
    return usage_error("\"%s\" is none of decode, append, prefill, wake%s", argv[1],
                       generate::did_you_mean(argv[1], names).c_str());
  }

  std::vector<std::string> given;
  TOOL_TRY(parse_flags(flags, argc - 2, argv + 2, &options->asked, &given));
  if (raw.policy >= 0) options->policy = tandem_policy_name(raw.policy);
  if (raw.isa >= 0) options->isa = tandem_cpu_isa_name(raw.isa);
  options->output = static_cast<Output>(raw.output);
  fill_defaults(options);
  TOOL_TRY(check_together(*options));
  TOOL_TRY(check_used(given, *options));
  return read_patterns(options);
}

int32_t BenchOptions::k_rotation_of(int32_t kv_type) const {
  if (k_rotation != TANDEM_ROTATION_DEFAULT) return k_rotation;
  const bool can_rotate = (head_dim & (head_dim - 1)) == 0 && rope_theta == 0 && !v_aliases_k;
  return kv_type == TANDEM_Q4_0 && can_rotate ? TANDEM_ROTATION_HADAMARD : TANDEM_ROTATION_NONE;
}

std::string bench_help() {
  BenchOptions options;
  RawChoices raw;
  return "tandem bench decode|append|prefill|wake [flags]\n\n"
         "  decode   one new token per sequence; GB/s of K and V against what the memory gives in the same run\n"
         "  append   a few new tokens at the end of a long cache; GFLOP/s against oneDNN's matrix products in the same run\n"
         "  prefill  likewise, many new tokens\n"
         "  wake     what a call costs when there is almost nothing to read (warm: everything in cache)\n\n"
         "A call is one layer: append the tokens, attend. Before anything is timed, outputs are checked against attention\n"
         "in double precision; when they are wrong no time is printed and the exit code is 1. Rows\n"
         "are printed as they are measured. Ctrl-C ends the program, and prints what the case under way has by then.\n\n" +
         flags_help(bench_flags(&options, &raw));
}

}  // namespace tools
