// SPDX-License-Identifier: MIT
// tandem-demo without a mode flag: the first thing that a user sees.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "demo.h"
#include "picture.h"

namespace generate {
namespace {

constexpr int64_t kAnswerRoom = 16, kQuestionRoom = 64, kNumbers = 5;

std::vector<Fact> make_facts(int64_t seed) {
  std::mt19937_64 random(static_cast<uint64_t>(seed));
  std::vector<Fact> facts;
  for (const std::string& name : fact_names(kNumbers, &random)) facts.push_back(number_fact(name, &random));
  facts.insert(facts.begin() + 1, pass_key_fact(&random));
  return facts;
}

// Prefills the text and decodes its last `n_decode` bytes one by one, which are scored.
Failure read_text(const DemoOptions& options, const std::string& text, Runtime* runtime,
                  std::vector<Contestant>* contestants) {
  const std::string_view view = text;
  const int64_t n_prefill = static_cast<int64_t>(view.size()) - options.n_decode - 1, n_common = n_prefill - kTailTokens;
  Session dense;
  Context prefilled;
  GENERATE_TRY(runtime->new_session({}, &dense));
  prefilled.session = dense.get();
  GENERATE_TRY(runtime->new_sequence(&prefilled.sequence));
  AppendOptions append;
  append.label = "prefill";
  append.more_follows = true;
  const WorkMeter meter(prefilled);
  GENERATE_TRY(runtime->append(&prefilled, view.substr(0, n_common), append));
  Work prefill;
  GENERATE_TRY(meter.finish(prefilled, &prefill));
  if (!options.json) std::printf("Read at %.0f tokens per second.\n\n", prefill.tokens_per_second());
  GENERATE_TRY(make_contestants(runtime, options.policies, options.policy, contestants));
  for (Contestant& contestant : *contestants) {
    GENERATE_TRY(enter(runtime, prefilled, view.substr(n_common, kTailTokens), &contestant));
    GENERATE_TRY(score_known(runtime, view, n_prefill, options.n_decode, &contestant));
  }
  return runtime->drop(prefilled);
}

Failure picture_of(const DemoOptions& options, const ModelConfig& config, const Contestant& contestant,
                   const Context& context, KeptPicture* picture) {
  char settings[160];
  std::snprintf(settings, sizeof settings, "%s, window %lld, sinks %lld, beta %g, after the question about the pass key",
                contestant.policy.policy.c_str(), static_cast<long long>(options.policy.window_tokens),
                static_cast<long long>(options.policy.sink_tokens), options.policy.beta);
  picture->subtitle = settings;
  picture->n_tokens = context.n_tokens;
  picture->sink_tokens = options.policy.sink_tokens;
  picture->window_tokens = options.policy.window_tokens;
  std::vector<int64_t> kept(context.n_tokens);
  for (int64_t layer_idx = 0; layer_idx < config.n_layers; ++layer_idx) {
    for (int64_t kv_head_idx = 0; kv_head_idx < config.n_kv_heads; ++kv_head_idx) {
      int64_t n_kept = 0;
      GENERATE_TANDEM(tandem_session_selection(kept.data(), nullptr, context.n_tokens, &n_kept, context.session,
                                               context.sequence, static_cast<int32_t>(layer_idx),
                                               static_cast<int32_t>(kv_head_idx), 0, &error));
      picture->bands.push_back({layer_idx, kv_head_idx, {kept.begin(), kept.begin() + std::min(n_kept, context.n_tokens)}});
    }
  }
  return {};
}

Failure draw(const DemoOptions& options, const KeptPicture& picture) {
  std::string path;
  if (!draws_pictures(options)) return {};
  GENERATE_TRY(picture_path(options, "kept.png", &path));
  GENERATE_TRY(draw_kept(picture, path));
  if (!options.json) std::printf("\nWhich keys each head kept: %s\n", path.c_str());
  return {};
}

}  // namespace

Failure run_demo(const DemoOptions& options, Runtime* runtime) {
  std::string text;
  std::vector<Fact> facts = make_facts(options.seed);
  GENERATE_TRY(load_haystack(options, options.context, &text));
  text = hide_facts(text, options.context - kQuestionRoom - kAnswerRoom, &facts);
  const ModelConfig& config = runtime->config();
  if (!options.json)
    std::printf("%s: %lld layers, %lld query heads on %lld KV heads of %lld. %lld facts hidden in %lld tokens of text.\n",
                std::filesystem::path(options.engine.model_directory).filename().c_str(),
                static_cast<long long>(config.n_layers), static_cast<long long>(config.n_q_heads),
                static_cast<long long>(config.n_kv_heads), static_cast<long long>(config.head_dim),
                static_cast<long long>(facts.size()), static_cast<long long>(options.context));
  std::vector<Contestant> contestants;
  GENERATE_TRY(read_text(options, text, runtime, &contestants));

  KeptPicture picture;
  if (!options.json) std::printf("%-11s%7s %10s", "hidden fact", "depth", "value");
  for (const Contestant& c : contestants)
    if (!options.json) std::printf("  %12s", c.policy.policy.c_str());
  for (const Fact& fact : facts) {
    if (!options.json)
      std::printf("\n%-11s%5.0f %% %10s", fact.name.c_str(),
                  100.0 * static_cast<double>(fact.position) / static_cast<double>(options.context), fact.value.c_str());
    const bool is_key = fact.name == "pass key";
    picture.marks.push_back({fact.name, fact.position, static_cast<int64_t>(fact.statement.size()), is_key});
    for (Contestant& contestant : contestants) {
      std::string answer;
      Context after;
      GENERATE_TRY(ask(runtime, fact, &contestant, &answer, &after));
      if (is_key && contestant.policy.policy == "hgca")
        GENERATE_TRY(picture_of(options, config, contestant, after, &picture));
      GENERATE_TRY(runtime->drop(after));
      if (!options.json) std::printf("  %12s", (shown(answer) + (is_right(fact, answer) ? "  " : " X")).c_str());
      std::fflush(stdout);
    }
  }
  if (options.json)
    std::printf("%s\n", contestants_json(contestants).c_str());
  else
    std::printf("\n\n");
  if (!options.json) print_contestants(contestants);
  return picture.bands.empty() ? Failure{} : draw(options, picture);
}

}  // namespace generate
