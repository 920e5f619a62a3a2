// SPDX-License-Identifier: MIT
// Presets of policy "hip". "small" is Tandem's own. The others are from the paper (InfiniteHiP, arXiv 2502.08910, appendix
// F). The paper does not print the refresh intervals of "5k", nor any value of "16k-shallow" except chunk and window. Those
// are assumed.
#include <cstring>
#include <iterator>

#include "lib/policy/pruning.h"

namespace tandem {
namespace {

constexpr int64_t kK = 1024;
constexpr size_t kFirstLayers = 3;  // the paper keeps more keys in these layers

PruningRecord paper_3k(size_t layer_idx, int64_t first, int64_t second, int64_t third) {
  const int64_t keep_len = layer_idx < kFirstLayers ? 4 * kK : 2 * kK;
  return {256,
          kK,
          {PruningStage{Judge::kDescent, 256, 32 * kK, first}, PruningStage{Judge::kDescent, 32, 8 * kK, second},
           PruningStage{Judge::kDescent, 8, keep_len, third}}};
}

PruningRecord paper_5k(size_t) {
  return {256,
          kK,
          {PruningStage{Judge::kDescent, 64, 32 * kK, 16}, PruningStage{Judge::kDescent, 32, 16 * kK, 8},
           PruningStage{Judge::kDescent, 16, 4 * kK, 4}}};
}

PruningRecord paper_16k_shallow(size_t layer_idx) {
  return {256, layer_idx < kFirstLayers ? 128 * kK : kK, {PruningStage{Judge::kDescent, 32, 16 * kK, 16}}};
}

constexpr int64_t kShort = 32 * kK;  // tokens; below, one stage with bounds of 8 replaces the two of longer chunks

// Bounds find keys whose neighbours score low. The chunks that they keep are then judged by all of their keys. With each
// kept chunk the next one is kept: a list serves four tokens, and copying a text needs consecutive keys.
PruningRecord small_decode(size_t) {
  PruningRecord made{64,
                     kK,
                     {PruningStage{Judge::kBounds, 64, 24 * kK, 16}, PruningStage{Judge::kBounds, 16, 7 * kK, 8},
                      PruningStage{Judge::kBounds, 8, 3 * kK, 4}, PruningStage{Judge::kExact, 8, 5 * kK / 2, 4}}};
  made.stages[0].from_len = made.stages[1].from_len = made.stages[2].to_len = kShort;
  made.stages[3].plus_next = true;
  return made;
}

// Appends run all stages for each block of queries, so they judge less.
PruningRecord small_append(size_t) {
  PruningRecord made{64,
                     kK,
                     {PruningStage{Judge::kBounds, 64, 16 * kK, 16}, PruningStage{Judge::kBounds, 16, 4 * kK, 8},
                      PruningStage{Judge::kExact, 8, 2 * kK, 4}, PruningStage{Judge::kBounds, 8, 2 * kK, 4}}};
  for (PruningStage& each : made.stages) each.from_len = kShort;
  made.stages[2].plus_next = true;
  made.stages[3].from_len = 0;
  made.stages[3].to_len = kShort;
  return made;
}

struct Preset {
  const char* name;
  PruningRecord (*decode)(size_t layer_idx);
  PruningRecord (*append)(size_t layer_idx);
};

PruningRecord usual_3k(size_t layer_idx) { return paper_3k(layer_idx, 16, 8, 4); }
PruningRecord fast_3k(size_t layer_idx) { return paper_3k(layer_idx, 32, 16, 8); }
PruningRecord flash_3k(size_t layer_idx) { return paper_3k(layer_idx, 96, 24, 8); }

constexpr Preset kPresets[] = {
    {"small", small_decode, small_append},
    {"3k", usual_3k, usual_3k},
    {"3k-fast", fast_3k, fast_3k},
    {"3k-flash", flash_3k, flash_3k},
    {"5k", paper_5k, paper_5k},
    {"3k-5k", paper_5k, usual_3k},
    {"16k-shallow", paper_16k_shallow, paper_16k_shallow},
};

}  // namespace

bool find_pruning_preset(const char* name, size_t layer_idx, PruningOfLayer* found) {
  for (const Preset& preset : kPresets) {
    if (std::strcmp(preset.name, name) != 0) continue;
    *found = {preset.decode(layer_idx), preset.append(layer_idx)};
    return true;
  }
  return false;
}

const char* pruning_preset_names() { return "small, 3k, 3k-fast, 3k-flash, 5k, 3k-5k, 16k-shallow"; }

}  // namespace tandem
