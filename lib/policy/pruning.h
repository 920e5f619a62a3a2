// SPDX-License-Identifier: MIT
// Options of a policy that prunes keys hierarchically. Each layer has one record for calls with one query per sequence and
// for guesses, and one for calls with several queries. pruning.h of the ABI explains each number.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/base/status.h"
#include "lib/model/layer.h"

namespace tandem {

inline constexpr int64_t kMostStages = 8;  // stages of a record
inline constexpr int64_t kMostQueryBlock = 64;
inline constexpr int32_t kMostBoundedDim = 288;  // kernels' limit; a row of bounds has two numbers per dim

enum class Judge : int32_t { kDescent = TANDEM_JUDGE_DESCENT, kBounds = TANDEM_JUDGE_BOUNDS, kExact = TANDEM_JUDGE_EXACT };

struct PruningStage {
  Judge judge = Judge::kExact;
  int64_t chunk_len = 0, keep_len = 0, interval = 1;
  bool plus_next = false;
  int64_t query_block = 64;
  int64_t from_len = 0, to_len = 0;  // 0: no limit

  // True if the stage applies. n_seen: tokens that a query sees, its own included.
  bool is_there(int64_t n_seen) const { return n_seen >= from_len && (to_len == 0 || n_seen < to_len); }
};

struct PruningRecord {
  int64_t sink_len = 64, window_len = 1024;
  std::vector<PruningStage> stages;
};

struct PruningOfLayer {
  PruningRecord decode, append;
};

struct Pruning {
  bool shares_lists = false;
  std::vector<PruningOfLayer> layers;  // [n_layers]; empty: no layer's policy prunes
};

// Finds a preset's records for a layer. Returns false if no preset has that name.
bool find_pruning_preset(const char* name, size_t layer_idx, PruningOfLayer* found);
const char* pruning_preset_names();  // separated by commas

// prunes: [n_layers], true for layers whose policy prunes. INVALID_ARGUMENT, NOT_FOUND, UNSUPPORTED (pruning and its
// members).
Status resolve_pruning(const tandem_session_options& options, const std::vector<bool>& prunes,
                       const std::vector<Layer>& layers, Pruning* pruning);

}  // namespace tandem
