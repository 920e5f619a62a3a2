// SPDX-License-Identifier: MIT
// Uses of a model: continue a text, or measure how well the model predicts one.
#ifndef EXAMPLES_GENERATE_GENERATION_H_
#define EXAMPLES_GENERATE_GENERATION_H_

#include <chrono>
#include <functional>
#include <string>
#include <string_view>

#include "failure.h"
#include "runtime.h"

namespace generate {

// Time and KV bytes of decode steps, or of a prefill.
struct Work {
  int64_t n_tokens = 0;
  double seconds = 0;
  int64_t resident_bytes = 0, host_bytes = 0, dense_bytes = 0;
  void add(const Work& other);
  double tokens_per_second() const { return seconds > 0 ? static_cast<double>(n_tokens) / seconds : 0; }
  double bytes_per_token() const;
  double dense_bytes_per_token() const;
  double share() const;  // share of the bytes that dense attention would have read
};

// Measures the work between its construction and finish().
class WorkMeter {
 public:
  explicit WorkMeter(const Context& context);
  Failure finish(const Context& context, Work* work) const;

 private:
  tandem_session_stats before_;
  int64_t n_tokens_;
  std::chrono::steady_clock::time_point start_;
};

struct Outcome {
  std::string answer;
  double bits_per_byte = -1;  // -1: not scored
  int64_t n_scored = 0;       // bytes scored
  Work prefill, decode;
  double selected_share = -1;  // of the keys outside window and sinks, now; -1: no such keys
  double pair_share = -1;      // (query, key) pairs that heads with patterns attended, of all pairs; -1: no patterns
};

struct SamplingOptions {
  int64_t n_predict = 64;
  double temperature = 0;
  int64_t seed = 0;
  std::function<Failure(char)> on_token;  // called for each token; a failure ends the generation
  std::string label;                      // label of the progress bar; empty: no bar
};

// Refuses bits computed from logits that are not finite.
Failure check_bits(const Runtime& runtime, const Context& context, double bits);

// After an interruption, the outcome of these four functions covers the work done so far.

// Continues the text in `context`. The logits of its last token must be available.
Failure continue_text(Runtime* runtime, Context* context, const SamplingOptions& options, Outcome* outcome);
// Prefills the prompt and continues it.
Failure generate_text(Runtime* runtime, Context* context, std::string_view prompt, const SamplingOptions& options,
                      Outcome* outcome);

// Scores a text in one prefill. Logits after byte i predict byte i + 1. With n bytes of context, the predictions after bytes
// n / 2 to n - 1 are scored, so `text` has n + 1 bytes.
Failure score_text(Runtime* runtime, Context* context, std::string_view text, Outcome* outcome);
// Prefills the first n - n_decode bytes, then decodes n_decode bytes in single steps. After each decoded byte, scores the
// prediction of the byte that follows, so `text` has n + 1 bytes.
Failure score_decode(Runtime* runtime, Context* context, std::string_view text, int64_t n_decode, Outcome* outcome);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_GENERATION_H_
