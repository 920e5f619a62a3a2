// SPDX-License-Identifier: MIT
// What the host knows of a search on a device without asking the device. Which stages run, and how many chunks they judge,
// follows from lengths and from the searches before (lib/tables/search.h). The host goes by the same rules when it commits a
// call.
//
// One thing depends on the keys: whether a stage keeps the last of its chunks, part of which may lie behind the end of the
// candidates. The host counts as if it did not. So the next stage judges as many chunks as counted here, or fewer by less
// than one of its parents.
#pragma once

#include <array>
#include <cstdint>

#include "lib/model/layer.h"
#include "lib/policy/pruning.h"

namespace tandem {

// Lists that a sequence keeps in a layer, and when they were made.
struct KeptStages {
  struct Stage {
    uint32_t mark = 0, places = 0;  // as in KeptList
    int64_t ran_at = 0;
    int64_t n_tokens = 0;        // of the chunks that it has kept, at most
    int64_t begin = 0, end = 0;  // has_all: it has kept all chunks here
    bool has_all = false;
  };
  std::array<Stage, static_cast<size_t>(kMostStages)> stages;
  uint32_t mark = 0;  // of the search that was last
};

// A search for the query block whose first query is token p0.
struct CountedSearch {
  const PruningRecord& record;
  const Layer& layer;  // as the device's window has it
  bool shares_lists;   // one list for all KV heads
  bool overlaps;       // candidates reach into the window, as in a decode call
  int64_t p0;
  uint32_t mark;  // lists of another one are not there any more
};
struct SearchCounts {
  int64_t n_stages = 0;  // that have run
  int64_t judged_bytes = 0;
  std::array<int64_t, static_cast<size_t>(kMostStages)> stage_bytes = {};  // these, by stage
};
// Returns what the search does, and leaves in *kept what it leaves on the device.
SearchCounts count_search(const CountedSearch& search, KeptStages* kept);
// What the stages of decode calls read to judge chunks, of a sequence in a layer that has so many tokens as the search says:
// in a call on average, the first stage alone, and in a call in which all stages run.
struct PlannedJudging {
  double mean_bytes = 0.0, first_mean_bytes = 0.0, most_bytes = 0.0;
};
PlannedJudging plan_judging(const CountedSearch& search);
// Returns the place of the last stage that is there for token p0; -1: none is.
int32_t last_place(const PruningRecord& record, int64_t p0);

}  // namespace tandem
