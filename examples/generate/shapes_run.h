// SPDX-License-Identifier: MIT
// --shapes: times decode steps of random weights in a model's shapes, over a context that was not computed. Only its last
// tokens are computed if a prefill is timed too.
#ifndef EXAMPLES_GENERATE_SHAPES_RUN_H_
#define EXAMPLES_GENERATE_SHAPES_RUN_H_

#include <string>

#include "repeat_check.h"
#include "runtime.h"

namespace generate {

struct ShapesRun {
  int64_t n_context = 0;   // tokens of the context
  int64_t n_prefill = 0;   // the last ones of these, which are computed and timed
  int64_t n_tokens = 0;    // decode steps after them
  std::string route = {};  // of the session; empty: Tandem's default, "auto"

  int64_t longest() const;  // final length of the sequence in tokens
};

struct ShapesOutcome {
  double fill_seconds = 0;
  double median_ms = 0, most_ms = 0, mean_ms = 0;  // of a step, from token to token
  double tokens_per_second = 0;
  double prefill_tokens_per_second = 0;
  // Distance of a step's logits from those of the same step at the same place, relative to the length of the first's. The
  // second step replays the graph if the first went kernel by kernel. repeat_of() gives the bound.
  double replay_distance = 0;
};

// Returns what two runs of a step have in common with this engine and route.
Repeat repeat_of(const EngineOptions& engine, const ShapesRun& run, int64_t n_layers);
// Runs steps after the context. Each gets the previous step's most likely token. Refuses logits that are not finite, and a
// step whose logits change when it is repeated (repeat_check.h).
Failure run_shapes(Runtime* runtime, Context* context, const ShapesRun& run, ShapesOutcome* outcome);
// Measures a prefill: appends n_tokens tokens twice, the second time after the first have been removed, with all memory
// there.
Failure time_prefill(Runtime* runtime, Context* context, int64_t n_tokens, double* tokens_per_second);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_SHAPES_RUN_H_
