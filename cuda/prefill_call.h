// SPDX-License-Identifier: MIT
// The argument of prefill kernels, and the table of compiled instances.
#pragma once

#include "cuda/decode_call.h"

namespace tandem::cuda {

struct PrefillCall : DecodeCall {
  int32_t n_splits;    // parts of an item's keys, one block each; max_tiles counts tiles of this kernel
  int32_t n_shares;    // not 0: clusters that share the keys of all items by length, instead of n_splits
  int32_t tile_words;  // of the lists of tiles (tile_words())
  const float *before_o, *before_lse;
  DeviceTileLists tiles;
};

// How a call names keys, beside ranges.
enum KeyNames : int32_t { kNoNames, kTileNames, kGranuleNames };

// A compiled kernel.
struct PrefillKernel {
  int32_t k_type, v_type;
  int32_t k_dim, v_dim;
  int32_t tile_rows;  // query rows of a block
  int32_t tile_keys;
  int32_t n_threads;     // threads of a block
  int32_t n_blocks;      // blocks on a multiprocessor, at most
  int32_t shared_bytes;  // dynamic shared memory of a block
  int32_t state_floats;
  int32_t of_multiprocessor;  // shared memory that the kernel is made for (kernels/shared_sizes.cuh), 0: for 9.0 alone
  int32_t most_q_parts;       // most summands of a query's numbers that the kernel multiplies
  bool is_narrow;             // q is multiplied as f16, else as bf16
  bool is_sm90;               // for compute capability 9.0 alone (90a)
  bool takes_caps;            // the kernel applies soft caps
  bool copies_q;              // the kernel takes q only in K's type, in rows of whole 16-byte pieces
  bool takes[3];              // by KeyNames: whether the kernel takes such calls
  const void* function;
  BoxShape box;  // box of K and of V, of kernels that take a map of it; else 0. Kernels that take granules get a second map,
                 // of granules.
};

}  // namespace tandem::cuda
