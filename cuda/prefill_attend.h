// SPDX-License-Identifier: MIT
// Calls of many queries: which kernel, which grid, what it needs.
#pragma once

#include "cuda/kernel_setup.h"
#include "cuda/prefill_call.h"

namespace tandem::cuda {

// As DecodeLauncher (cuda/decode_attend.h).
class PrefillLauncher {
 public:
  explicit PrefillLauncher(const DeviceLimits& limits) : limits_(limits) {}

  // The kernel for queries of such rows, and the blocks that run at once.
  int32_t choose(const Layer& layer, const DeviceRows& q, bool has_tiles, const PrefillKernel** kernel, int32_t* n_blocks,
                 DeviceError* error) const;
  int64_t states_bytes() const;
  int64_t counters_bytes(const DeviceAttend& call) const;  // whatever the type of the queries
  int32_t launch(const DeviceAttend& call, int64_t states_bytes, cudaStream_t stream, DeviceError* error) const;

 private:
  const PrefillKernel* find(const Layer& layer, const DeviceRows& q, bool has_tiles) const;

  DeviceLimits limits_;
};

}  // namespace tandem::cuda
