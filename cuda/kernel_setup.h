// SPDX-License-Identifier: MIT
// What launching any attention kernel needs.
#pragma once

#include "cuda/decode_call.h"
#include "cuda/driver.h"

namespace tandem::cuda {

struct DeviceLimits {
  int32_t capability = 0;  // of the device: 90 is 9.0
  int32_t n_multiprocessors = 0;
  int32_t shared_of_block = 0, shared_of_multiprocessor = 0;  // bytes
  int32_t most_size = 0;                                      // of kernels that come in sizes (kernels/shared_sizes.cuh)
  int32_t code = 0;  // the compute capability of the code that the device runs, which may be older than the device

  // Whether the device runs code that is for 9.0 alone (90a). A newer one that runs code for 9.0 does not.
  bool has_90a() const { return capability == 90 && code == 90; }
  // Blocks on a multiprocessor, as far as shared memory goes; the system keeps 1 KiB of each.
  int32_t most_blocks(int32_t shared_bytes) const;
};

// UNSUPPORTED and the reason: no kernel serves its types and dims (cuda/layer_check.h has what none does).
int32_t refuse_types(const Layer& layer, DeviceError* error);
int32_t refuse_page_len(int32_t page_len, DeviceError* error);

// Summands of a query's numbers. bf16 and f16 numbers are f16 once a row is moved into its range; a bf16 number is one bf16,
// an f16 two, an f32 three.
int32_t count_q_parts(int32_t q_type, bool is_narrow);

// All but max_tiles, states and counters.
DecodeCall describe_call(const DeviceAttend& call, bool is_narrow, const DeviceLimits& limits);
// Multiprocessors that the call's kernel is to leave to the append beside it.
int32_t left_to_append(const DeviceAttend& call, const DeviceLimits& limits);

struct KernelNeeds {
  const void* function;
  int32_t n_threads, shared_bytes;
  int32_t k_dim, v_dim;  // for messages
};
// Makes a kernel ready; *n_fit: blocks that run at once on a multiprocessor, one at least.
int32_t set_up_kernel(const KernelNeeds& needs, const DeviceLimits& limits, int32_t* n_fit, DeviceError* error);

// Clusters of so many blocks that run at once; 0: none, or it cannot be told. Kernels are ready (set_up_kernel()). Any
// thread.
int32_t count_clusters(const void* function, int32_t n_threads, int32_t shared_bytes, int32_t n_blocks);

// The map with which the copy engine brings boxes from anywhere in memory (kernels/bulk_copy.cuh).
int32_t make_map(const BoxShape& box, CUtensorMap* map, DeviceError* error);

}  // namespace tandem::cuda
