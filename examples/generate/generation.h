// SPDX-License-Identifier: MIT
// What one does with a model: let it continue a text, or ask how well it predicts one.
#ifndef EXAMPLES_GENERATE_GENERATION_H_
#define EXAMPLES_GENERATE_GENERATION_H_

#include <chrono>
#include <functional>
#include <string>
#include <string_view>

#include "failure.h"
#include "runtime.h"

namespace generate {

// Time and KV bytes of some decode steps, or of a prefill.
struct Work {
  int64_t n_tokens = 0;
  double seconds = 0;
  int64_t resident_bytes = 0, host_bytes = 0, dense_bytes = 0;
  void add(const Work& other);
  double tokens_per_second() const { return seconds > 0 ? static_cast<double>(n_tokens) / seconds : 0; }
  double bytes_per_token() const;
  double dense_bytes_per_token() const;
  double share() const;  // of what dense attention would have read
};

// Measures from its construction to finish().
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
  int64_t n_scored = 0;       // bytes
  Work prefill, decode;
  double selected_share = -1;  // of the keys outside window and sinks, now; -1: there are none
  double pair_share = -1;      // of the pairs of a query and a key, those that heads with patterns attended; -1: likewise
};

struct SamplingOptions {
  int64_t n_predict = 64;
  double temperature = 0;
  int64_t seed = 0;
  std::function<Failure(char)> on_token;  // as they come; a failure ends it
  std::string label;                      // of the progress bar; empty: none
};

// Refuses bits of text that came out of logits which are no numbers.
Failure check_bits(const Runtime& runtime, const Context& context, double bits);

// After an interruption the outcome of these four is that of what has been done.

// Continues the text in `context`, whose last logits must be at hand.
Failure continue_text(Runtime* runtime, Context* context, const SamplingOptions& options, Outcome* outcome);
// Prefills the prompt and continues it.
Failure generate_text(Runtime* runtime, Context* context, std::string_view prompt, const SamplingOptions& options,
                      Outcome* outcome);

// Logits after byte i predict byte i + 1; n bytes of context are scored on the n / 2 predictions after bytes n / 2 ... n -
// 1, so `text` has n + 1 bytes. All of it in one prefill.
Failure score_text(Runtime* runtime, Context* context, std::string_view text, Outcome* outcome);
// The first n - n_decode bytes as prefill, then n_decode steps of one byte each, scored on the bytes that follow them.
Failure score_decode(Runtime* runtime, Context* context, std::string_view text, int64_t n_decode, Outcome* outcome);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_GENERATION_H_
