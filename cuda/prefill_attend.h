// SPDX-License-Identifier: MIT
// Calls of many queries: which kernel, which grid, what it needs.
#pragma once

#include "cuda/kernel_setup.h"
#include "cuda/prefill_call.h"

namespace tandem::cuda {

// What a kernel is chosen for.
struct PrefillNeeds {
  const Layer& layer;
  const DeviceRows& q;
  int32_t max_q_len;  // queries of a sequence
  KeyNames names;
};

// As DecodeLauncher (cuda/decode_attend.h).
class PrefillLauncher {
 public:
  explicit PrefillLauncher(const DeviceLimits& limits) : limits_(limits) {}

  // The kernel, and the blocks that run at once.
  int32_t choose(const PrefillNeeds& needs, const PrefillKernel** kernel, int32_t* n_blocks, DeviceError* error) const;
  // Whether there is a kernel for calls with granules.
  bool takes_granules(const Layer& layer, const DeviceRows& q) const;
  // Whether there is a kernel for calls of few rows, more than a decode kernel has in a tile.
  bool serves_few_rows(const PrefillNeeds& needs) const;
  int64_t states_bytes() const;
  int64_t counters_bytes(const DeviceAttend& call) const;  // whatever the type of the queries
  int32_t launch(const DeviceAttend& call, int64_t states_bytes, cudaStream_t stream, DeviceError* error) const;

 private:
  const PrefillKernel* find(const PrefillNeeds& needs) const;

  DeviceLimits limits_;
};

}  // namespace tandem::cuda
