// SPDX-License-Identifier: MIT
// Calls of few queries: which kernel, which grid, what it needs.
#pragma once

#include "cuda/decode_call.h"
#include "cuda/driver.h"

namespace tandem::cuda {

// Of one device, which is current in every call. Any thread.
class DecodeLauncher {
 public:
  DecodeLauncher(int32_t n_multiprocessors, int32_t shared_of_block, int32_t shared_of_multiprocessor);  // bytes

  // The kernel for calls of up to max_q_len queries a sequence, and the blocks that run at once.
  int32_t choose(const Layer& layer, int32_t max_q_len, const DecodeKernel** kernel, int32_t* n_blocks,
                 DeviceError* error) const;
  int64_t workspace_bytes(const DeviceAttend& call) const;
  int32_t launch(const DeviceAttend& call, cudaStream_t stream, DeviceError* error) const;

 private:
  int32_t prepare(const DecodeKernel& kernel, int32_t* n_blocks, DeviceError* error) const;

  int32_t n_multiprocessors_, shared_of_block_, shared_of_multiprocessor_;
  int64_t state_bytes_;
};

}  // namespace tandem::cuda
