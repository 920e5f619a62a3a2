// SPDX-License-Identifier: MIT
// Calls of few queries: which kernel, which grid, what it needs.
#pragma once

#include "cuda/kernel_setup.h"

namespace tandem::cuda {

// Of one device, which is current in every call. Any thread. A workspace is states and, behind them, counters, which are 0
// between calls; states_bytes: of all states, in whichever launcher's calls.
class DecodeLauncher {
 public:
  // Query rows of a sequence and KV head. More rows are for prefill kernels: decode kernels would read K and V too often.
  // Where there is a prefill kernel for few rows, all rows but those of one tile are for it.
  static constexpr int64_t kMostRows = 64;

  explicit DecodeLauncher(const DeviceLimits& limits) : limits_(limits) {}

  // The kernel for calls of up to max_q_len queries a sequence, and the blocks that run at once.
  int32_t choose(const Layer& layer, int32_t max_q_len, bool has_lists, const DecodeKernel** kernel, int32_t* n_blocks,
                 DeviceError* error) const;
  bool has_one_tile(const DeviceAttend& call) const;  // of rows, of a sequence and KV head
  int64_t states_bytes() const;                       // that any of its calls needs on this device
  // For calls of no more sequences, and of no more queries of each, of which others may be another launcher's.
  int64_t counters_bytes(const DeviceAttend& of) const;
  int32_t launch(const DeviceAttend& call, int64_t states_bytes, cudaStream_t stream, DeviceError* error) const;

 private:
  // The best that there is for a layer and calls of up to max_q_len queries a sequence; null: there is none.
  const DecodeKernel* find(const Layer& layer, int32_t max_q_len, bool has_lists) const;

  bool serves_maps(const DecodeKernel& kernel) const;

  DeviceLimits limits_;
};

}  // namespace tandem::cuda
