// SPDX-License-Identifier: MIT
// --shapes: decode steps of a model of some shapes with random weights, over a context that nothing has computed, but for
// its last tokens where a prefill is timed too.
#ifndef EXAMPLES_GENERATE_SHAPES_RUN_H_
#define EXAMPLES_GENERATE_SHAPES_RUN_H_

#include <string>

#include "repeat_check.h"
#include "runtime.h"

namespace generate {

struct ShapesRun {
  int64_t n_context = 0;   // tokens that are there
  int64_t n_prefill = 0;   // of these, the last ones, computed and timed
  int64_t n_tokens = 0;    // steps behind them
  std::string route = {};  // of the session; empty: Tandem's default, "auto"

  int64_t longest() const;  // tokens that the sequence has in the end
};

struct ShapesOutcome {
  double fill_seconds = 0;
  double median_ms = 0, most_ms = 0, mean_ms = 0;  // of a step, from token to token
  double tokens_per_second = 0;
  double prefill_tokens_per_second = 0;
  // A step against the same step at the same place, which replayed the graph where the first went kernel by kernel: distance
  // of their logits by the length of the first's. repeat_of() says what it may be.
  double replay_distance = 0;
};

// What two runs of a step have in common with such an engine and route.
Repeat repeat_of(const EngineOptions& engine, const ShapesRun& run, int64_t n_layers);
// Steps behind the context, each fed the token that the one before found most likely. Refuses logits that are not finite,
// and a step that gives other logits the second time (repeat_check.h).
Failure run_shapes(Runtime* runtime, Context* context, const ShapesRun& run, ShapesOutcome* outcome);
// Appends n_tokens tokens twice, the second time where the first have been taken back, with all memory there: how fast.
Failure time_prefill(Runtime* runtime, Context* context, int64_t n_tokens, double* tokens_per_second);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_SHAPES_RUN_H_
