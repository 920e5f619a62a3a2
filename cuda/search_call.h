// SPDX-License-Identifier: MIT
// The arguments of the kernels of search() and bound_chunks(). The layers in the calls are in host memory, and kernels do
// not read them.
#pragma once

#include "cuda/window_keys.h"
#include "lib/tables/device.h"

namespace tandem::cuda {

struct float_pair {  // a row's largest logit, and its sum of exponentials relative to that
  float most, sum;
};

struct SearchCall {
  DeviceSearch search;
  WindowKeys keys;
  int32_t stage;  // index of the stage that the launch is for
  // If the search runs beside the append: the word in which the append writes its epoch once the window has its rows. Else
  // null.
  const int64_t* rows_written;
  int64_t epoch;
  int32_t n_kv_heads, group_size;
  int32_t n_lists;                        // lists of a block
  int32_t n_pieces;                       // blocks that share the candidates of a query block and KV head
  int32_t most_tiles;                     // tiles of eight query rows that shared memory has room for
  int32_t has_sums;                       // 1: an earlier launch has made the rows' sums, and scores are final
  int64_t list_bytes[kMostSearchStages];  // from one kept list of a stage to the next
  float sm_scale;
  // Areas of the work space. Each has a leading dimension [n_query_blocks].
  int32_t* counters;  // [n_lists]: blocks that have judged; 0 between calls
  uint32_t* ordered;  // [n_lists][most_candidates]: scores as integers in the same order
  int32_t* best;      // [n_lists][most_best]: chunks kept by score, where their next chunks are kept, too
  float* scores;      // [n_kv_heads][head_scores]: scores of candidates, or of each row's candidates where sums count
  float_pair* sums;   // [n_kv_heads][n_pieces][most_rows]
  int64_t most_candidates, most_best, head_scores, most_rows;
};

// The shared memory of the kernels of WideKernels: for each of two warpgroups some stages of 64 rows, and for each head
// kHeadRows query rows. Rows are filled up to whole steps. A step has as many numbers as a stage has of a row. Query rows
// lie step by step.
inline constexpr int kHeadRows = 64, kSwizzledRow = 128;  // kSwizzledRow in bytes
inline constexpr int kWideGroups = 2, kWideStages = 3, kWideStageBytes = 64 * kSwizzledRow, kWideStep = 64;
constexpr int32_t wide_bytes(int32_t n_heads, int32_t n_numbers) {
  const int32_t n_steps = (n_numbers + kWideStep - 1) / kWideStep;
  return kWideGroups * kWideStages * kWideStageBytes + n_steps * n_heads * kHeadRows * kSwizzledRow;
}

struct BoundChunksCall {
  DeviceBoundChunks bound;
  WindowKeys keys;
  int32_t n_kv_heads;
};

using SearchKernel = void (*)(SearchCall);

// Kernels for blocks of many queries (kernels/wide_judges.cuh) that serve n_heads query heads at a time.
struct WideKernels {
  int32_t n_heads;
  SearchKernel bounds, exact, sums, descent;
};

inline constexpr int kSearchWarps = 8, kBoundWarps = 8;  // warps of a block
inline constexpr int32_t kMostSearchLists = 65536;       // lists that counters have room for

}  // namespace tandem::cuda
