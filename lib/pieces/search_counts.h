// SPDX-License-Identifier: MIT
// Predicts a search on a device without asking the device. The stages that run and the number of chunks that they judge
// follow from lengths and from earlier searches (lib/tables/search.h). The host applies the same rules when it commits a
// call.
//
// One fact depends on the keys: whether a stage keeps its last chunk, part of which may lie behind the end of the
// candidates. The host counts as if the stage did not keep it. So the next stage judges the number of chunks counted here,
// or fewer by less than one parent's.
#pragma once

#include <array>
#include <cstdint>

#include "lib/model/layer.h"
#include "lib/policy/pruning.h"

namespace tandem {

// The lists that a sequence keeps in a layer, and the tokens at which they were made.
struct KeptStages {
  struct Stage {
    uint32_t mark = 0, places = 0;  // as in KeptList
    int64_t ran_at = 0;
    int64_t n_tokens = 0;        // tokens of the chunks that it has kept, at most
    int64_t begin = 0, end = 0;  // has_all: it has kept all chunks in this range
    bool has_all = false;
  };
  std::array<Stage, static_cast<size_t>(kMostStages)> stages;
  uint32_t mark = 0;  // mark of the latest search
};

// A search for the query block whose first query is token p0.
struct CountedSearch {
  const PruningRecord& record;
  const Layer& layer;  // as in the device's window
  bool shares_lists;   // all KV heads share one list
  bool overlaps;       // candidates reach into the window, as in decode calls
  int64_t p0;
  uint32_t mark;  // lists with another mark are out of date
};
struct SearchCounts {
  int64_t n_stages = 0;  // stages that have run
  int64_t judged_bytes = 0;
  std::array<int64_t, static_cast<size_t>(kMostStages)> stage_bytes = {};  // judged_bytes by stage
};
// Returns the counts of a search. Updates *kept to the lists that the search leaves on the device.
SearchCounts count_search(const CountedSearch& search, KeptStages* kept);
// Bytes that the stages of decode calls read to judge chunks, for one sequence and layer at the search's length: the mean
// per call, the first stage's mean per call, and the bytes of a call in which all stages run.
struct PlannedJudging {
  double mean_bytes = 0.0, first_mean_bytes = 0.0, most_bytes = 0.0;
};
PlannedJudging plan_judging(const CountedSearch& search);
// Returns the index of the last stage that applies at token p0; -1 if none applies.
int32_t last_place(const PruningRecord& record, int64_t p0);

}  // namespace tandem
