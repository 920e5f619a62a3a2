// SPDX-License-Identifier: MIT
#include "shapes_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace generate {
namespace {

constexpr int32_t kFirstToken = 1;
constexpr int kWarmSteps = 3;
// Sums over keys may be cut elsewhere between window and host, and their states are rounded to 16 bits in each layer.
constexpr double kMostDistance = 0.02;

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

Failure next_token(Runtime* runtime, const Context& context, int32_t* token) {
  *token = runtime->most_likely();
  if (*token >= 0) return {};
  return {runtime->options().name() + ": the logits after " + std::to_string(context.n_tokens) + " tokens are not finite"};
}

double distance(const std::vector<float>& a, const float* b) {
  double difference = 0, length = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    length += std::pow(static_cast<double>(a[i]), 2);
  }
  return std::sqrt(difference / length);
}

// The first step of a session goes kernel by kernel, the second is captured and replayed: both at one place.
Failure compare_routes(Runtime* runtime, Context* context, ShapesOutcome* outcome) {
  int32_t token = 0;
  GENERATE_TRY(runtime->step(context, kFirstToken));
  GENERATE_TRY(next_token(runtime, *context, &token));
  const std::vector<float> first(runtime->last_logits(), runtime->last_logits() + runtime->config().vocab_size);
  GENERATE_TRY(runtime->take_back(context, 1));
  GENERATE_TRY(runtime->step(context, kFirstToken));
  GENERATE_TRY(next_token(runtime, *context, &token));
  outcome->replay_distance = distance(first, runtime->last_logits());
  if (outcome->replay_distance <= kMostDistance) return {};
  return {runtime->options().name() + ": a step gave other logits the second time, " +
          std::to_string(outcome->replay_distance) + " of their length apart"};
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

Failure run_shapes(Runtime* runtime, Context* context, const ShapesRun& run, ShapesOutcome* outcome) {
  const int64_t n_tokens = run.n_tokens;
  const auto begin = Clock::now();
  GENERATE_TRY(runtime->fill(context, run.n_context - run.n_prefill));
  outcome->fill_seconds = seconds_since(begin);
  if (run.n_prefill > 0) GENERATE_TRY(time_prefill(runtime, context, run.n_prefill, &outcome->prefill_tokens_per_second));
  GENERATE_TRY(compare_routes(runtime, context, outcome));
  int32_t token = kFirstToken;
  std::vector<double> ms;
  for (int64_t i = 0; i < kWarmSteps + n_tokens; ++i) {
    const auto step_begin = Clock::now();
    GENERATE_TRY(runtime->step(context, token));
    GENERATE_TRY(next_token(runtime, *context, &token));
    if (i >= kWarmSteps) ms.push_back(1e3 * seconds_since(step_begin));
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
