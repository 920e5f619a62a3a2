// SPDX-License-Identifier: MIT
// Calls of few queries: which kernel, which grid, what it needs.
#pragma once

#include <mutex>
#include <unordered_map>

#include "cuda/decode_call.h"
#include "cuda/driver.h"

namespace tandem::cuda {

// Of one device, which is current in every call. Any thread.
class DecodeLauncher {
 public:
  DecodeLauncher(int32_t n_multiprocessors, int32_t shared_bytes)
      : n_multiprocessors_(n_multiprocessors), shared_bytes_(shared_bytes) {}

  // The kernel for calls of up to max_q_len queries a sequence, and the blocks that run at once.
  int32_t choose(const Layer& layer, int32_t max_q_len, const DecodeKernel** kernel, int32_t* n_blocks, DeviceError* error);
  int64_t workspace_bytes(const DeviceAttend& call);
  int32_t launch(const DeviceAttend& call, cudaStream_t stream, DeviceError* error);

 private:
  int32_t prepare(const DecodeKernel& kernel, int32_t* n_blocks, DeviceError* error);

  const int32_t n_multiprocessors_;
  const int32_t shared_bytes_;  // that a block may have
  std::mutex mutex_;
  std::unordered_map<const void*, int32_t> n_blocks_;  // of kernels that were made ready
};

}  // namespace tandem::cuda
