// SPDX-License-Identifier: MIT
// The argument of decode kernels, and the table of compiled instances.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "lib/tables/device.h"

namespace tandem::cuda {

struct DecodeCall {
  const std::byte* planes[kPlanes];
  int64_t head_stride[kPlanes];
  int32_t page_len;
  int32_t n_sequences;
  const DeviceSequence* sequences;
  const int64_t* page_tables;
  DeviceRows q;
  DeviceOutput out, finished;
  int64_t sliding_window;
  float sm_scale, soft_cap;
  int32_t n_kv_heads, group_size;
  int32_t n_q_parts;  // summands that each number of a query is split into
  int32_t max_tiles;  // tiles of query rows, of a sequence and KV head
  float* states;      // [n_blocks][2][state_floats]
  // All counts are 0 between calls. Decode kernels count per item, [n_sequences][n_kv_heads][max_tiles]. Prefill kernels
  // without clusters count per item, too. Those with clusters have [clusters][blocks of a cluster], for clusters that leave
  // states.
  int32_t* counters;
  int32_t* group_counters;  // decode kernels, [n_blocks]: groups of an item's blocks, from its first block on
  DeviceLists lists;
  // The word in which an append that runs beside the kernel says that the window has its rows. The word is `epoch` then.
  // Null if no append runs beside the kernel.
  const int64_t* rows_written;
  int64_t epoch;
};

// The boxes that a tensor map of the copy engine describes: `keys` rows, a panel wide (kernels/bulk_copy.cuh).
struct BoxShape {
  int32_t row_bytes = 0, panel_bytes = 0, keys = 0;
};
inline constexpr uint64_t kMapBase = 1 << 20;  // the first address in any map

// A compiled kernel.
struct DecodeKernel {
  int32_t k_type, v_type;
  int32_t k_dim, v_dim;
  int32_t tile_rows;     // query rows that a block works on at once
  int32_t n_threads;     // threads of a block
  int32_t shared_bytes;  // dynamic shared memory of a block
  int32_t state_floats;
  int32_t of_multiprocessor;  // made for this shared memory (kernels/shared_sizes.cuh); 0: the kernel takes maps
  bool is_narrow;             // q is multiplied as f16, else as bf16
  bool takes_lists;           // the kernel serves calls with key lists, and no others
  const void* function;
  BoxShape k_box, v_box;  // of kernels for compute capability 9.0, which take maps of these boxes; else 0
};

}  // namespace tandem::cuda
