// SPDX-License-Identifier: MIT
// Calls of many queries: chooses the kernel, its grid and its work space.
#pragma once

#include "cuda/kernel_setup.h"
#include "cuda/prefill_call.h"

namespace tandem::cuda {

// The properties of a call that decide which kernel serves it.
struct PrefillNeeds {
  const Layer& layer;
  const DeviceRows& q;
  int32_t max_q_len;  // queries of a sequence
  KeyNames names;
};

// Launches prefill kernels. Threads, devices and workspaces are as in DecodeLauncher (cuda/decode_attend.h).
class PrefillLauncher {
 public:
  explicit PrefillLauncher(const DeviceLimits& limits) : limits_(limits) {}

  // Chooses the kernel. *n_blocks is the number of blocks that run at once.
  int32_t choose(const PrefillNeeds& needs, const PrefillKernel** kernel, int32_t* n_blocks, DeviceError* error) const;
  // True if a kernel serves calls with granules.
  bool takes_granules(const Layer& layer, const DeviceRows& q) const;
  // True if a kernel for few rows serves the call. Such a kernel takes more rows than a tile of a decode kernel.
  bool serves_few_rows(const PrefillNeeds& needs) const;
  int64_t states_bytes() const;
  int64_t counters_bytes(const DeviceAttend& call) const;  // enough for queries of any type
  int32_t launch(const DeviceAttend& call, int64_t states_bytes, cudaStream_t stream, DeviceError* error) const;

 private:
  const PrefillKernel* find(const PrefillNeeds& needs) const;

  DeviceLimits limits_;
};

}  // namespace tandem::cuda
