// SPDX-License-Identifier: MIT
// --passkey and --numbers.
#include <algorithm>
#include <cstdio>

#include "demo.h"

namespace generate {
namespace {

constexpr int64_t kAnswerRoom = 16;  // bytes kept free for the answer, so that --context limits the whole text

Failure finish(const DemoOptions& options, const std::vector<Contestant>& contestants) {
  if (options.json)
    std::printf("%s\n", contestants_json(contestants).c_str());
  else
    print_contestants(contestants);
  return {};
}

// Tests one depth. `base` holds the text before the key and is forked. `rest` (the key and the text after it) and the
// question follow.
Failure ask_pass_key(const Context& base, std::string_view rest, const Fact& fact, Runtime* runtime,
                     std::vector<Contestant>* contestants, std::vector<std::string>* answers) {
  const int64_t n_common = std::max<int64_t>(static_cast<int64_t>(rest.size()) - kTailTokens, 0);
  Context prefilled;
  GENERATE_TRY(runtime->fork(base, base.session, &prefilled));
  AppendOptions append;
  append.label = "prefill";
  append.more_follows = true;
  GENERATE_TRY(runtime->append(&prefilled, rest.substr(0, n_common), append));
  for (Contestant& contestant : *contestants) {
    std::string answer;
    GENERATE_TRY(enter(runtime, prefilled, rest.substr(n_common), &contestant));
    GENERATE_TRY(ask(runtime, fact, &contestant, &answer));
    GENERATE_TRY(runtime->drop(contestant.context));
    answers->push_back(answer);
  }
  return runtime->drop(prefilled);
}

}  // namespace

// The text before the key is the same at every depth. So one sequence grows from depth to depth and is forked at each.
Failure run_passkey(const DemoOptions& options, Runtime* runtime) {
  std::string text;
  std::mt19937_64 random(static_cast<uint64_t>(options.seed));
  GENERATE_TRY(load_haystack(options, options.context, &text));
  Session dense;
  Context base;
  GENERATE_TRY(runtime->new_session({}, &dense));
  base.session = dense.get();
  GENERATE_TRY(runtime->new_sequence(&base.sequence));
  std::vector<Contestant> contestants;
  GENERATE_TRY(make_contestants(runtime, options.policies, options.policy, &contestants));
  if (!options.json) {
    std::printf("depth      key");
    for (const Contestant& c : contestants) std::printf("  %9s", c.policy.policy.c_str());
    std::printf("\n");
  }
  for (int64_t i = 0; i < options.n_depths; ++i) {
    const Fact fact = pass_key_fact(&random);
    const int64_t n_text = options.context - static_cast<int64_t>(fact.question.size()) - kAnswerRoom;
    // The last place leaves 300 bytes after it, as in the training's evaluation.
    const int64_t place = line_end_before(text, (n_text - 300) * (2 * i + 1) / (2 * options.n_depths));
    AppendOptions append;
    append.label = "prefill";
    append.more_follows = true;
    if (place > base.n_tokens)
      GENERATE_TRY(runtime->append(&base, std::string_view(text).substr(base.n_tokens, place - base.n_tokens), append));
    std::vector<std::string> answers;
    std::string rest = fact.statement + text.substr(base.n_tokens);
    rest.resize(n_text - base.n_tokens);
    GENERATE_TRY(ask_pass_key(base, rest, fact, runtime, &contestants, &answers));
    if (options.json) continue;
    std::printf("%4.1f %%  %7s", 100.0 * static_cast<double>(base.n_tokens) / static_cast<double>(n_text),
                fact.value.c_str());
    for (const std::string& answer : answers)
      std::printf("  %9s", (shown(answer) + (is_right(fact, answer) ? "" : " X")).c_str());
    std::printf("\n");
    std::fflush(stdout);
  }
  return finish(options, contestants);
}

Failure run_numbers(const DemoOptions& options, Runtime* runtime) {
  std::mt19937_64 random(static_cast<uint64_t>(options.seed));
  std::vector<Fact> facts;
  for (const std::string& name : fact_names(options.n_numbers, &random)) facts.push_back(number_fact(name, &random));
  std::string text;
  GENERATE_TRY(load_haystack(options, options.context, &text));
  text = hide_facts(text, options.context - 64 - kAnswerRoom, &facts);  // 64: length of the longest question

  Session dense;
  Context prefilled;
  GENERATE_TRY(runtime->new_session({}, &dense));
  prefilled.session = dense.get();
  GENERATE_TRY(runtime->new_sequence(&prefilled.sequence));
  AppendOptions append;
  append.label = "prefill";
  append.more_follows = true;
  const std::string_view view = text;
  GENERATE_TRY(runtime->append(&prefilled, view.substr(0, view.size() - kTailTokens), append));
  std::vector<Contestant> contestants;
  GENERATE_TRY(make_contestants(runtime, options.policies, options.policy, &contestants));
  if (!options.json) std::printf("%-10s  %7s", "number of", "");
  for (Contestant& contestant : contestants) {
    if (!options.json) std::printf("  %9s", contestant.policy.policy.c_str());
    GENERATE_TRY(enter(runtime, prefilled, view.substr(view.size() - kTailTokens), &contestant));
  }
  if (!options.json) std::printf("\n");
  for (const Fact& fact : facts) {
    if (!options.json) std::printf("%-10s  %7s", fact.name.c_str(), fact.value.c_str());
    for (Contestant& contestant : contestants) {
      std::string answer;
      GENERATE_TRY(ask(runtime, fact, &contestant, &answer));
      if (!options.json) std::printf("  %9s", (shown(answer) + (is_right(fact, answer) ? "" : " X")).c_str());
    }
    if (!options.json) std::printf("\n");
  }
  return finish(options, contestants);
}

}  // namespace generate
