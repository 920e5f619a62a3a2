// SPDX-License-Identifier: MIT
// Setup that all attention kernels share: device limits, types, maps.
#pragma once

#include "cuda/decode_call.h"
#include "cuda/driver.h"

namespace tandem::cuda {

struct DeviceLimits {
  int32_t capability = 0;  // compute capability of the device: 90 is 9.0
  int32_t n_multiprocessors = 0;
  int32_t shared_of_block = 0, shared_of_multiprocessor = 0;  // bytes
  int32_t most_size = 0;  // size limit of kernels that come in two sizes (kernels/shared_sizes.cuh)
  int32_t code = 0;       // compute capability of the code that the device runs, which may be older than the device

  // True if the device runs code for 9.0 alone (90a). A newer device that runs code for 9.0 does not.
  bool has_90a() const { return capability == 90 && code == 90; }
  // Returns the blocks that the shared memory of a multiprocessor has room for, at least 1. The system reserves 1 KiB a
  // block.
  int32_t most_blocks(int32_t shared_bytes) const;
};

// Returns UNSUPPORTED and the reason: no kernel serves the layer's types and dims. cuda/layer_check.h refuses layers that
// no kernel of the module can serve.
int32_t refuse_types(const Layer& layer, DeviceError* error);
int32_t refuse_page_len(int32_t page_len, DeviceError* error);

// Returns the summands that each number of a query is split into. Kernels with narrow queries multiply f16, after they
// scale a row into its range: bf16 and f16 take one summand, f32 two. Other kernels multiply bf16: bf16 takes one, f16 two,
// f32 three.
int32_t count_q_parts(int32_t q_type, bool is_narrow);

// Fills all fields but max_tiles, states and counters.
DecodeCall describe_call(const DeviceAttend& call, bool is_narrow, const DeviceLimits& limits);
// Returns the multiprocessors that the call's kernel leaves to the append beside it.
int32_t left_to_append(const DeviceAttend& call, const DeviceLimits& limits);

struct KernelNeeds {
  const void* function;
  int32_t n_threads, shared_bytes;
  int32_t k_dim, v_dim;  // for error messages
};
// Makes a kernel ready for launches. *n_fit: blocks that run at once on a multiprocessor, at least 1.
int32_t set_up_kernel(const KernelNeeds& needs, const DeviceLimits& limits, int32_t* n_fit, DeviceError* error);

// Returns how many clusters of n_blocks blocks run at once. 0: none, or CUDA cannot tell. set_up_kernel() was called for
// the kernel before. Any thread may call.
int32_t count_clusters(const void* function, int32_t n_threads, int32_t shared_bytes, int32_t n_blocks);

// Makes the tensor map with which the copy engine reads boxes from anywhere in memory (kernels/bulk_copy.cuh).
int32_t make_map(const BoxShape& box, CUtensorMap* map, DeviceError* error);

}  // namespace tandem::cuda
