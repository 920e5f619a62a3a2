// SPDX-License-Identifier: MIT
// What a decode kernel gets, and the table of its instances.
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
  int32_t n_q_parts;  // summands of a query's numbers
  int32_t max_tiles;  // of query rows, of a sequence and KV head
  float* states;      // [n_blocks][2][state_floats]
  // All counts are 0 between calls. Of a decode kernel's items [n_sequences][n_kv_heads][max_tiles]; of a prefill
  // kernel's items, or where it has clusters, of those that leave states, [clusters][blocks of a cluster].
  int32_t* counters;
  int32_t* group_counters;  // of decode kernels, [n_blocks]: groups of an item's blocks, from its first block on
  DeviceLists lists;
  // Where an append that runs beside the kernel says that the window has its rows: this is `epoch` then. Null: there is
  // none.
  const int64_t* rows_written;
  int64_t epoch;
};

// What a map of the copy engine is for: boxes of `keys` rows, a panel wide (kernels/bulk_copy.cuh).
struct BoxShape {
  int32_t row_bytes = 0, panel_bytes = 0, keys = 0;
};
inline constexpr uint64_t kMapBase = 1 << 20;  // the first address in any map

// A compiled kernel.
struct DecodeKernel {
  int32_t k_type, v_type;
  int32_t k_dim, v_dim;
  int32_t tile_rows;     // query rows that a block works on at once
  int32_t n_threads;     // of a block
  int32_t shared_bytes;  // dynamic
  int32_t state_floats;
  int32_t of_multiprocessor;  // shared memory that it is made for (kernels/shared_sizes.cuh), 0: kernels that take maps
  bool is_narrow;             // q is multiplied as f16, else as bf16
  bool takes_lists;           // it serves calls with key lists, and no others
  const void* function;
  BoxShape k_box, v_box;  // of kernels for compute capability 9.0, which take maps of these; else 0
};

}  // namespace tandem::cuda
