// SPDX-License-Identifier: MIT
#include "shapes_run.h"

#include <algorithm>
#include <chrono>

#include "progress_bar.h"

namespace generate {
namespace {

constexpr int32_t kFirstToken = 1;
constexpr int kWarmSteps = 3;

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

Failure next_token(Runtime* runtime, const Context& context, int32_t* token) {
  *token = runtime->most_likely();
  if (*token >= 0) return {};
  return {runtime->options().name() + ": the logits after " + std::to_string(context.n_tokens) + " tokens are not finite"};
}

// Runs the same step twice at one place. With K and V on the device, a session's first step runs kernel by kernel, and its
// second step is captured and replayed.
Failure compare_routes(Runtime* runtime, Context* context, const Repeat& repeat, ShapesOutcome* outcome) {
  int32_t token = 0;
  GENERATE_TRY(runtime->step(context, kFirstToken));
  GENERATE_TRY(next_token(runtime, *context, &token));
  const auto n = static_cast<size_t>(runtime->config().vocab_size);
  const std::vector<float> first(runtime->last_logits(), runtime->last_logits() + n);
  GENERATE_TRY(runtime->take_back(context, 1));
  GENERATE_TRY(runtime->step(context, kFirstToken));
  GENERATE_TRY(next_token(runtime, *context, &token));
  const Failure failure = check_repeat(first, {runtime->last_logits(), n}, repeat, &outcome->replay_distance);
  return failure ? Failure{runtime->options().name() + ": " + failure.message} : failure;
}

}  // namespace

Failure time_prefill(Runtime* runtime, Context* context, int64_t n_tokens, double* tokens_per_second) {
  std::string text(static_cast<size_t>(n_tokens), '\0');
  for (int64_t i = 0; i < n_tokens; ++i) text[i] = static_cast<char>(i * 131 % 251);
  for (const bool is_timed : {false, true}) {
    const auto begin = Clock::now();
    GENERATE_TRY(runtime->append(context, text));
    if (is_timed) *tokens_per_second = static_cast<double>(n_tokens) / seconds_since(begin);
    int32_t token = 0;
    GENERATE_TRY(next_token(runtime, *context, &token));
    if (!is_timed) GENERATE_TRY(runtime->take_back(context, n_tokens));
  }
  return {};
}

Repeat repeat_of(const EngineOptions& engine, const ShapesRun& run, int64_t n_layers) {
  // Single calls have one plan, except under route "auto", the default. Steps are replayed unless an option prevents that.
  const bool by_calls = engine.kv_place == kOnHost, is_auto = run.route.empty() || run.route == "auto";
  const bool is_replayed = !by_calls && !engine.eager && engine.weights_place == kOnDevice;
  Repeat repeat;
  repeat.is_one_plan = by_calls ? !is_auto : !is_replayed;
  repeat.n_layers = n_layers;
  repeat.n_keys = run.n_context;
  const bool is_bf16 = engine.compute == 2 || (engine.compute == 0 && !engine.shapes.empty());
  repeat.significant_bits = is_bf16 ? 8 : 24;
  return repeat;
}

int64_t ShapesRun::longest() const { return n_context + 1 + kWarmSteps + n_tokens; }

Failure run_shapes(Runtime* runtime, Context* context, const ShapesRun& run, ShapesOutcome* outcome) {
  const int64_t n_tokens = run.n_tokens;
  const auto begin = Clock::now();
  GENERATE_TRY(runtime->fill(context, run.n_context - run.n_prefill));
  outcome->fill_seconds = seconds_since(begin);
  if (run.n_prefill > 0) GENERATE_TRY(time_prefill(runtime, context, run.n_prefill, &outcome->prefill_tokens_per_second));
  GENERATE_TRY(compare_routes(runtime, context, repeat_of(runtime->options(), run, runtime->config().n_layers), outcome));
  int32_t token = kFirstToken;
  std::vector<double> ms;
  ProgressBar bar("decode", kWarmSteps + n_tokens, "steps");
  for (int64_t i = 0; i < kWarmSteps + n_tokens; ++i) {
    const auto step_begin = Clock::now();
    GENERATE_TRY(runtime->step(context, token));
    GENERATE_TRY(next_token(runtime, *context, &token));
    if (i >= kWarmSteps) ms.push_back(1e3 * seconds_since(step_begin));
    bar.show(i + 1);
  }
  double sum = 0;
  for (const double x : ms) sum += x;
  std::sort(ms.begin(), ms.end());
  outcome->median_ms = ms[ms.size() / 2];
  outcome->most_ms = ms.back();
  outcome->mean_ms = sum / static_cast<double>(n_tokens);
  outcome->tokens_per_second = 1e3 / outcome->mean_ms;
  return {};
}

}  // namespace generate
