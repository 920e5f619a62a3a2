// SPDX-License-Identifier: MIT
#include "generation.h"

#include <algorithm>
#include <cmath>

#include "progress_bar.h"
#include "sampler.h"

namespace generate {
namespace {

Failure finish(const Context& context, Outcome* outcome) {
  tandem_session_stats stats;
  GENERATE_TRY(session_stats(context.session, &stats));
  if (stats.host_keys > 0)
    outcome->selected_share = static_cast<double>(stats.selected_keys) / static_cast<double>(stats.host_keys);
  if (stats.pattern_dense_pairs > 0)
    outcome->pair_share = static_cast<double>(stats.pattern_pairs) / static_cast<double>(stats.pattern_dense_pairs);
  return {};
}

Failure not_finite(const Runtime& runtime, int64_t n_tokens) {
  return {runtime.options().name() + ": the logits after " + std::to_string(n_tokens) +
          " tokens are not finite: its weights are not, or computing with them overflows"};
}

}  // namespace

Failure check_bits(const Runtime& runtime, const Context& context, double bits) {
  return std::isfinite(bits) ? Failure{} : not_finite(runtime, context.n_tokens);
}

void Work::add(const Work& other) {
  n_tokens += other.n_tokens;
  seconds += other.seconds;
  resident_bytes += other.resident_bytes;
  host_bytes += other.host_bytes;
  dense_bytes += other.dense_bytes;
}

double Work::bytes_per_token() const {
  return n_tokens ? static_cast<double>(resident_bytes + host_bytes) / static_cast<double>(n_tokens) : 0;
}

double Work::dense_bytes_per_token() const {
  return n_tokens ? static_cast<double>(dense_bytes) / static_cast<double>(n_tokens) : 0;
}

double Work::share() const {
  return dense_bytes ? static_cast<double>(resident_bytes + host_bytes) / static_cast<double>(dense_bytes) : 0;
}

WorkMeter::WorkMeter(const Context& context) : n_tokens_(context.n_tokens) {
  if (session_stats(context.session, &before_)) before_ = TANDEM_SESSION_STATS_INIT;  // finish() meets the same error
  start_ = std::chrono::steady_clock::now();
}

Failure WorkMeter::finish(const Context& context, Work* work) const {
  work->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  work->n_tokens = context.n_tokens - n_tokens_;
  tandem_session_stats after;
  GENERATE_TRY(session_stats(context.session, &after));
  work->resident_bytes = after.resident_kv_bytes_read - before_.resident_kv_bytes_read;
  work->host_bytes = after.host_kv_bytes_read - before_.host_kv_bytes_read;
  work->dense_bytes = after.dense_kv_bytes - before_.dense_kv_bytes;
  return {};
}

Failure continue_text(Runtime* runtime, Context* context, const SamplingOptions& options, Outcome* outcome) {
  Sampler sampler(options.temperature, static_cast<uint64_t>(options.seed));
  ProgressBar bar(options.label, options.n_predict, "tokens");
  const WorkMeter meter(*context);
  Failure stopped;
  for (int64_t i = 0; i < options.n_predict && !stopped; ++i) {
    const int32_t best = runtime->most_likely();
    if (best < 0) return not_finite(*runtime, context->n_tokens);
    const bool samples = options.temperature > 0;
    const auto token =
        static_cast<char>(samples ? sampler.sample(runtime->last_logits(), runtime->config().vocab_size) : int64_t{best});
    outcome->answer.push_back(token);
    if (options.on_token) GENERATE_TRY(options.on_token(token));
    if (i + 1 < options.n_predict) stopped = runtime->step_byte(context, token);
    if (stopped.is_error()) return stopped;
    bar.show(i + 1);
  }
  GENERATE_TRY(meter.finish(*context, &outcome->decode));
  GENERATE_TRY(finish(*context, outcome));
  return stopped;
}

Failure generate_text(Runtime* runtime, Context* context, std::string_view prompt, const SamplingOptions& options,
                      Outcome* outcome) {
  const WorkMeter meter(*context);
  AppendOptions append;
  append.label = "prefill";
  const Failure stopped = runtime->append(context, prompt, append);
  if (stopped.is_error()) return stopped;
  GENERATE_TRY(meter.finish(*context, &outcome->prefill));
  return stopped ? stopped : continue_text(runtime, context, options, outcome);
}

Failure score_text(Runtime* runtime, Context* context, std::string_view text, Outcome* outcome) {
  const int64_t n_context = static_cast<int64_t>(text.size()) - 1, vocab_size = runtime->config().vocab_size;
  const int64_t first_scored = n_context / 2;
  double bits = 0;
  AppendOptions append;
  append.label = "score";
  append.on_chunk = [&](int64_t first, int64_t n) {
    const int64_t from = std::max(first, first_scored), n_scored = first + n - from;
    if (n_scored <= 0) return;
    const float* logits = runtime->logits(from - first, n_scored);
    for (int64_t i = 0; i < n_scored; ++i)
      bits += bits_of(logits + i * vocab_size, vocab_size, static_cast<uint8_t>(text[from + i + 1]));
    outcome->n_scored += n_scored;
  };
  const WorkMeter meter(*context);
  const Failure stopped = runtime->append(context, text.substr(0, n_context), append);
  if (stopped.is_error()) return stopped;
  GENERATE_TRY(meter.finish(*context, &outcome->prefill));
  GENERATE_TRY(check_bits(*runtime, *context, bits));
  if (outcome->n_scored > 0) outcome->bits_per_byte = bits / static_cast<double>(outcome->n_scored);
  GENERATE_TRY(finish(*context, outcome));
  return stopped;
}

Failure score_decode(Runtime* runtime, Context* context, std::string_view text, int64_t n_decode, Outcome* outcome) {
  const int64_t n_prefill = static_cast<int64_t>(text.size()) - 1 - n_decode, vocab_size = runtime->config().vocab_size;
  AppendOptions append;
  append.label = "prefill";
  const WorkMeter prefill_meter(*context);
  Failure stopped = runtime->append(context, text.substr(0, n_prefill), append);
  if (stopped.is_error()) return stopped;
  GENERATE_TRY(prefill_meter.finish(*context, &outcome->prefill));
  double bits = 0;
  ProgressBar bar("decode", n_decode, "tokens");
  const WorkMeter decode_meter(*context);
  for (int64_t i = n_prefill; i < n_prefill + n_decode && !stopped; ++i) {
    stopped = runtime->step_byte(context, text[i]);
    if (stopped.is_error()) return stopped;
    if (stopped) break;
    bits += bits_of(runtime->last_logits(), vocab_size, static_cast<uint8_t>(text[i + 1]));
    bar.show(++outcome->n_scored);
  }
  GENERATE_TRY(decode_meter.finish(*context, &outcome->decode));
  GENERATE_TRY(check_bits(*runtime, *context, bits));
  if (outcome->n_scored > 0) outcome->bits_per_byte = bits / static_cast<double>(outcome->n_scored);
  GENERATE_TRY(finish(*context, outcome));
  return stopped;
}

}  // namespace generate
