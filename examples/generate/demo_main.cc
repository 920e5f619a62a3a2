// SPDX-License-Identifier: MIT
// tandem-demo: hides facts in a long text and lets the model answer, with dense and hybrid attention side by side.
#include <cstdio>

#include "data_file.h"
#include "demo.h"
#include "interrupt.h"
#include "llama_config.h"
#include "picture.h"
#include "program.h"

namespace generate {
namespace {

constexpr int64_t kMinContext = 2048;  // room for tail, question and some text before them
constexpr int64_t kMinBytesPerFact = 256;

std::string number(int64_t value) { return "\"" + std::to_string(value) + "\""; }

Failure check(const DemoOptions& options) {
  const int n_modes =
      (options.n_depths > 0) + (options.n_numbers > 0) + !options.curve_file.empty() + !options.loss_file.empty();
  if (n_modes > 1) return {"--passkey, --numbers, --curve, --loss: at most one of the four"};
  if (options.n_decode > options.context - kMinContext / 2)
    return {"--decode: " + number(options.n_decode) +
            " leaves too little of --context = " + std::to_string(options.context)};
  if (options.n_numbers * kMinBytesPerFact > options.context)
    return {"--numbers: " + number(options.n_numbers) + " do not fit into --context = " + std::to_string(options.context)};
  for (const std::string& name : split_names(options.policies)) {
    PolicyOptions policy;
    policy.set(name);
    GENERATE_TRY(policy.check("--policies"));
  }
  return options.engine.check();
}

// Checks what depends on files and the machine.
Failure check_files(const DemoOptions& options) {
  const bool draws_kept =
      options.n_depths == 0 && options.n_numbers == 0 && options.curve_file.empty() && options.loss_file.empty();
  GENERATE_TRY(check_length(options.engine.model_directory, "--context: " + number(options.context), options.context));
  const bool draws = have_pictures() && !options.picture_directory.empty();
  if (draws && !options.curve_file.empty()) GENERATE_TRY(check_picture_place(options, "curve.png"));
  if (draws && draws_kept) GENERATE_TRY(check_picture_place(options, "kept.png"));
  return options.engine.check_machine();
}

std::vector<std::string> policy_names_of(const DemoOptions& options) {
  std::vector<std::string> names;
  for (const std::string& name : split_names(options.policies)) {
    PolicyOptions policy;
    policy.set(name);
    names.push_back(policy.policy);
  }
  return names;
}

// Refuses flags of another mode, which would be unused.
Failure check_modes(const DemoOptions& options, const Flags& flags) {
  if (!options.loss_file.empty() && !options.one_pair)
    GENERATE_TRY(flags.refuse_given({"--v-type"}, "is the second of a pair, whose first is --kv-type, with --loss"));
  if (options.n_depths > 0 || options.n_numbers > 0)
    GENERATE_TRY(flags.refuse_given({"--decode", "--pictures"}, "is unused with --passkey and --numbers"));
  if (!options.loss_file.empty())
    return flags.refuse_given(
        {"--policies", "--text", "--seed", "--window", "--sinks", "--alpha", "--beta", "--halo", "--pruning", "--patterns",
         "--max-distance", "--decode", "--betas", "--windows", "--pictures"},
        "is unused with --loss");
  if (options.curve_file.empty()) {
    GENERATE_TRY(flags.refuse_given({"--offset"}, "is for --curve and --loss alone"));
    GENERATE_TRY(check_policy_flags(flags, policy_names_of(options), options.engine.place != kCpu));
    return flags.refuse_given({"--betas", "--windows"}, "is for --curve alone");
  }
  return flags.refuse_given(
      {"--policies", "--text", "--seed", "--window", "--beta", "--pruning", "--patterns", "--max-distance"},
      "is unused with --curve (--windows and --betas are its settings)");
}

Failure serve(DemoOptions* options) {
  const bool scores_text = !options->curve_file.empty() || !options->loss_file.empty();
  if (options->context == 0) options->context = options->n_numbers > 0 || scores_text ? 8192 : 16384;
  if (options->n_decode == 0) options->n_decode = options->curve_file.empty() ? 256 : 1024;
  GENERATE_TRY(as_usage(check(*options)));
  GENERATE_TRY(check_files(*options));
  catch_interrupts();
  if (!options->loss_file.empty()) return run_loss(*options);
  Runtime runtime;
  GENERATE_TRY(runtime.open(options->engine));
  if (options->n_depths > 0) return run_passkey(*options, &runtime);
  if (options->n_numbers > 0) return run_numbers(*options, &runtime);
  if (!options->curve_file.empty()) return run_curve(*options, &runtime);
  return run_demo(*options, &runtime);
}

Failure run(int argc, char** argv) {
  DemoOptions options;
  options.engine.model_directory = data_file("models/pico");
  options.policy.window_tokens = 1024;
  options.policy.sink_tokens = 64;
  options.policy.beta = 1;
  Flags flags(
      "tandem demo [flags]                  several facts hidden in one text, asked one after another\n"
      "tandem demo --passkey N [flags]      one pass key, hidden at N depths in turn\n"
      "tandem demo --numbers N [flags]      N named numbers in one text\n"
      "tandem demo --curve FILE [flags]     bits per byte against KV bytes read, over --betas and --windows\n"
      "tandem demo --loss FILE [flags]      what each storage type of K and V costs, against f16");
  flags.integer("--passkey", "depths at which a pass key is hidden", 1, 1000, &options.n_depths);
  flags.integer("--numbers", "named numbers hidden in one text", 1, 24, &options.n_numbers);
  flags.text("--curve", "FILE", "text to score", &options.curve_file);
  flags.text("--loss", "FILE", "text to score with every storage type, or with that of --kv-type and --v-type alone",
             &options.loss_file);
  flags.integer("--context", "bytes of context (default 16384; 8192 with --numbers, --curve and --loss)", kMinContext,
                int64_t{1} << 30, &options.context);
  flags.integer("--decode", "known bytes to decode and score at the end of the text\n(default 256; 1024 with --curve)", 1,
                int64_t{1} << 30, &options.n_decode);
  flags.integer("--offset", "first byte of the text of --curve or --loss (default 200000)", 0, int64_t{1} << 40,
                &options.text_offset);
  flags.reals("--betas", "settings of --curve (default 0.25,0.5,1,2)", 0, 1e6, &options.betas);
  flags.reals("--windows", "likewise, % of the context (default 5,12.5,25,50)", 0, 100, &options.windows);
  flags.text("--policies", "A,B", "who competes (default all,hgca); hip=PRUNING as with --pruning", &options.policies);
  flags.text("--text", "FILE", "text to hide facts in (default: the haystack.txt that comes with it)", &options.text_file);
  flags.text("--pictures", "DIR", "folder for pictures (default: none are drawn)", &options.picture_directory);
  flags.integer("--seed", "of the facts (default 1)", 0, INT64_MAX, &options.seed);
  options.engine.declare(&flags);
  options.policy.declare(&flags);
  flags.toggle("--json", "JSON instead of tables", &options.json);
  Asked asked = Asked::kNothing;
  GENERATE_TRY(flags.parse(argc, argv, &asked));
  if (asked == Asked::kHelp)
    std::printf("%s\nHere the window is 1024, sinks 64 and beta 1 unless given.\n", flags.help().c_str());
  if (asked == Asked::kVersion) std::fputs(version_text("tandem-demo").c_str(), stdout);
  if (asked != Asked::kNothing) return {};
  options.one_pair = flags.given("--kv-type");
  GENERATE_TRY(check_modes(options, flags));
  return serve(&options);
}

}  // namespace
}  // namespace generate

int main(int argc, char** argv) { return generate::run_program("tandem-demo", argc, argv, generate::run); }
