// SPDX-License-Identifier: MIT
// What a prefill kernel gets, and the table of its instances.
#pragma once

#include "cuda/decode_call.h"

namespace tandem::cuda {

struct PrefillCall : DecodeCall {
  int32_t n_splits;    // parts of an item's keys, a block each; max_tiles counts this kernel's tiles
  int32_t n_shares;    // not 0: clusters that all items' keys are divided among by length, instead of n_splits
  int32_t tile_words;  // of the tiles' lists
  const float *before_o, *before_lse;
  DeviceTileLists tiles;
};

// What names the keys of a call, beside ranges.
enum KeyNames : int32_t { kNoNames, kTileNames, kGranuleNames };

// A compiled kernel.
struct PrefillKernel {
  int32_t k_type, v_type;
  int32_t k_dim, v_dim;
  int32_t tile_rows;  // query rows of a block
  int32_t tile_keys;
  int32_t n_threads;     // of a block
  int32_t n_blocks;      // of a multiprocessor, at most
  int32_t shared_bytes;  // dynamic
  int32_t state_floats;
  int32_t of_multiprocessor;  // shared memory that it is made for (kernels/shared_sizes.cuh), 0: for 9.0 alone
  int32_t most_q_parts;       // summands of a query's numbers that it multiplies
  bool is_narrow;             // q is multiplied as f16, else as bf16
  bool is_sm90;               // for compute capability 9.0 alone
  bool takes_caps;            // soft caps
  bool copies_q;              // for q of K's type in rows of 16-byte pieces alone
  bool takes[3];              // calls, by what names their keys
  const void* function;
  BoxShape box;  // of K and of V, of kernels that take maps of it; else 0. One that takes granules has a map of these behind
};

}  // namespace tandem::cuda
