// SPDX-License-Identifier: MIT
// The arguments of the kernels of index_patterns() and list_patterns(). The layers in the calls are in host memory, and
// kernels do not read them.
#pragma once

#include <cuda.h>

#include "cuda/search_call.h"
#include "tandem/patterns.h"

namespace tandem::cuda {

// A launch of a probe kernel cuts the keys of a query head into pieces, one for each block of threads. It cuts a piece into
// runs, one for each warp.
inline constexpr int kProbeTile = 16;            // keys that a warp multiplies at a time
inline constexpr int kRunTiles = 16;             // tiles of a run
inline constexpr int kRunBands = kRunTiles + 5;  // bands of the distances between a run's keys and the probes
inline constexpr int kRunKeys = kRunTiles * kProbeTile, kPieceKeys = kSearchWarps * kRunKeys;
// A block of wide_probes.cuh walks over kWideRuns runs at a time. A stage holds one tile of each.
inline constexpr int kWideRuns = 4, kWidePieceKeys = kWideRuns * kRunKeys;
inline constexpr int kMostProbeStages = 8;
inline constexpr int kQueryBlock = TANDEM_PATTERN_BLOCK;
inline constexpr int kTokenPart = 4096, kBandPart = 1024;  // of a query head, for a block of threads that counts or chooses
inline constexpr int kChoices = 2;                         // choices of a query head: of tokens, and of bands
inline constexpr int kScoreTile = 64;  // key blocks, and query blocks, that one block of threads multiplies at a time
inline constexpr int kQueryMeanWarps = 8, kScoreWarps = 8, kListWarps = 8;

// The layout of PatternChoices, as kernels read it.
struct ChoicePlaces {
  int64_t n_words;                               // words of a sequence and query head
  int64_t bands_at, blocks_at;                   // words from the first word
  int32_t token_words, band_words, block_words;  // words of a row
};

struct PatternCall {
  DevicePatterns patterns;
  WindowKeys keys;
  ChoicePlaces places;
  int32_t sequence;  // index of the sequence that the launch is for
  int32_t n_q_heads, group_size;
  float sm_scale;
  // Areas of the work space, which serve one sequence at a time.
  int32_t n_pieces, n_runs;              // pieces and runs of a query head's keys, at most
  int32_t n_token_parts, n_band_parts;   // parts of a query head's tokens and bands, at most
  int32_t n_sums;                        // sums of a probe that the area has room for
  int32_t n_key_blocks, n_query_blocks;  // key blocks and query blocks, at most
  float_pair* sums;                      // [n_q_heads][n_sums][kPatternProbes], logits in units of log2(e)
  float* lse;                            // [n_q_heads][kPatternProbes], in units of log2(e)
  float* columns;                        // [n_q_heads][max_keys]: sums of the weights of a token
  int* bins;                             // [n_q_heads][kChoices][kDigits][kBins]: how many sums have a digit
  float* bands;                          // [n_q_heads][n_runs][kRunBands]: sums of the weights of a band, in a run
  float* key_means;                      // [n_kv_heads][n_key_blocks][dim]
  float* query_means;                    // [n_q_heads][n_query_blocks][dim]
  float* block_scores;                   // [n_q_heads][n_query_blocks][n_key_blocks]
};

using PatternKernel = void (*)(PatternCall);

// The argument of kernels whose keys the copy engine brings.
struct WidePatternCall {
  PatternCall call;
  int32_t n_stages;
  float scale;      // from products to logits in units of log2(e)
  CUtensorMap map;  // describes tiles of keys
};

// Probe kernels for compute capability 9.0 (kernels/wide_probes.cuh) that serve n_heads query heads at a time.
struct WideProbeKernels {
  int32_t n_heads;
  void (*sums)(WidePatternCall);
  void (*weights)(WidePatternCall);
};

// Returns the shared memory of these kernels in bytes: all probes, and n_stages stages of keys. A row is filled up to whole
// steps of kWideStep numbers.
constexpr int32_t wide_probe_bytes(int32_t n_heads, int32_t n_stages, int32_t dim) {
  constexpr int32_t kAlign = 1024;
  return kAlign +
         (dim + kWideStep - 1) / kWideStep * kSwizzledRow * (n_heads * kPatternProbes + n_stages * kWideRuns * kProbeTile);
}

}  // namespace tandem::cuda
