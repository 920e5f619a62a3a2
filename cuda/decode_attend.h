// SPDX-License-Identifier: MIT
// Calls of few queries: chooses the kernel, its grid and its work space.
#pragma once

#include "cuda/kernel_setup.h"

namespace tandem::cuda {

// Launches decode kernels on one device, which is current in every call. Any thread may call. A workspace holds the states
// and, behind them, counters that are 0 between calls. states_bytes is the size of all states, the same in the calls of
// every launcher.
class DecodeLauncher {
 public:
  // The most query rows of a sequence and KV head. More rows go to prefill kernels, as decode kernels would read K and V
  // too often. Where a prefill kernel for few rows exists, it also gets all rows that fill more than one decode tile.
  static constexpr int64_t kMostRows = 64;

  explicit DecodeLauncher(const DeviceLimits& limits) : limits_(limits) {}

  // Chooses the kernel for calls of up to max_q_len queries a sequence. *n_blocks is the number of blocks that run at once.
  int32_t choose(const Layer& layer, int32_t max_q_len, bool has_lists, const DecodeKernel** kernel, int32_t* n_blocks,
                 DeviceError* error) const;
  bool has_one_tile(const DeviceAttend& call) const;  // whether one tile takes all query rows of a sequence and KV head
  int64_t states_bytes() const;                       // the most that any decode call needs on this device
  // Bytes of counters that are enough for any call with at most as many sequences and queries of each. Calls of many
  // queries go to another launcher and do not count here.
  int64_t counters_bytes(const DeviceAttend& of) const;
  int32_t launch(const DeviceAttend& call, int64_t states_bytes, cudaStream_t stream, DeviceError* error) const;

 private:
  // Returns the best kernel for the layer and for calls of up to max_q_len queries a sequence. Null if none exists.
  const DecodeKernel* find(const Layer& layer, int32_t max_q_len, bool has_lists) const;

  bool serves_maps(const DecodeKernel& kernel) const;

  DeviceLimits limits_;
};

}  // namespace tandem::cuda
