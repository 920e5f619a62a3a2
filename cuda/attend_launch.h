// SPDX-License-Identifier: MIT
// attend(): chooses between decode and prefill kernels, and launches.
#pragma once

#include "cuda/decode_attend.h"
#include "cuda/prefill_attend.h"

namespace tandem::cuda {

// Launches attend() on one device, which is current in every call. Any thread may call.
class AttendLauncher {
 public:
  explicit AttendLauncher(const DeviceLimits& limits);

  int32_t supports(const Layer& stored, int32_t max_q_len, DeviceError* error) const;
  int64_t workspace_bytes(const DeviceAttend& of) const;
  int32_t most_list_rows(const Layer& stored, const DeviceRows& q) const;
  int32_t launch(const DeviceAttend& of, cudaStream_t stream, DeviceError* error) const;

 private:
  bool is_decode(const DeviceAttend& call) const;
  int32_t refuse_granules(const DeviceAttend& call, DeviceError* error) const;

  DecodeLauncher decode_;
  PrefillLauncher prefill_;
  int64_t states_bytes_;
};

}  // namespace tandem::cuda
