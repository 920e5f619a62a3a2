// SPDX-License-Identifier: MIT
// What the kernels of index_patterns() and list_patterns() get. The layers in the calls are the host's: kernels do not look
// at them.
#pragma once

#include <cuda.h>

#include "cuda/search_call.h"
#include "tandem/patterns.h"

namespace tandem::cuda {

// A launch of a probe kernel cuts the keys of a query head into pieces, one for each block of threads, and a piece into
// runs, one for each warp.
inline constexpr int kProbeTile = 16;            // keys that a warp multiplies at a time
inline constexpr int kRunTiles = 16;             // of a run
inline constexpr int kRunBands = kRunTiles + 5;  // bands that the keys of a run and the probes are apart
inline constexpr int kRunKeys = kRunTiles * kProbeTile, kPieceKeys = kSearchWarps * kRunKeys;
// A block of wide_probes.cuh walks over so many runs at a time: a tile of each is a stage.
inline constexpr int kWideRuns = 4, kWidePieceKeys = kWideRuns * kRunKeys;
inline constexpr int kMostProbeStages = 8;
inline constexpr int kQueryBlock = TANDEM_PATTERN_BLOCK;
inline constexpr int kTokenPart = 4096, kBandPart = 1024;  // of a query head, that a block of threads counts and chooses
inline constexpr int kChoices = 2;                         // tokens, and bands
inline constexpr int kScoreTile = 64;  // key blocks, and query blocks, that a block of threads multiplies at a time
inline constexpr int kQueryMeanWarps = 8, kScoreWarps = 8, kListWarps = 8;

// PatternChoices, as kernels read it.
struct ChoicePlaces {
  int64_t n_words;                               // of a sequence and query head
  int64_t bands_at, blocks_at;                   // words from the first
  int32_t token_words, band_words, block_words;  // of a row
};

struct PatternCall {
  DevicePatterns patterns;
  WindowKeys keys;
  ChoicePlaces places;
  int32_t sequence;  // of the call, that the launch is for
  int32_t n_q_heads, group_size;
  float sm_scale;
  // The work space has these areas, for one sequence at a time.
  int32_t n_pieces, n_runs;              // of a query head's keys, at most
  int32_t n_token_parts, n_band_parts;   // likewise
  int32_t n_sums;                        // that there is room for, of a probe
  int32_t n_key_blocks, n_query_blocks;  // at most
  float_pair* sums;                      // [n_q_heads][n_sums][kPatternProbes], logits in units of log2(e)
  float* lse;                            // [n_q_heads][kPatternProbes], likewise
  float* columns;                        // [n_q_heads][max_keys]: sums of the weights of a token
  int* bins;                             // [n_q_heads][kChoices][kDigits][kBins]: how many sums have a digit
  float* bands;                          // [n_q_heads][n_runs][kRunBands]: sums of the weights of a band, in a run
  float* key_means;                      // [n_kv_heads][n_key_blocks][dim]
  float* query_means;                    // [n_q_heads][n_query_blocks][dim]
  float* block_scores;                   // [n_q_heads][n_query_blocks][n_key_blocks]
};

using PatternKernel = void (*)(PatternCall);

// Of kernels that have the copy engine bring keys.
struct WidePatternCall {
  PatternCall call;
  int32_t n_stages;
  float scale;      // from products to logits in units of log2(e)
  CUtensorMap map;  // of tiles
};

// Probe kernels for compute capability 9.0 (kernels/wide_probes.cuh), of n_heads query heads at a time.
struct WideProbeKernels {
  int32_t n_heads;
  void (*sums)(WidePatternCall);
  void (*weights)(WidePatternCall);
};

// What they have in shared memory: all probes, and stages of keys. A row has whole steps of kWideStep numbers.
constexpr int32_t wide_probe_bytes(int32_t n_heads, int32_t n_stages, int32_t dim) {
  constexpr int32_t kAlign = 1024;
  return kAlign +
         (dim + kWideStep - 1) / kWideStep * kSwizzledRow * (n_heads * kPatternProbes + n_stages * kWideRuns * kProbeTile);
}

}  // namespace tandem::cuda
