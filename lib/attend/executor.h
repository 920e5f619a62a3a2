// SPDX-License-Identifier: MIT
// Attend calls, from the caller's tensors to the caller's tensors. Every call goes the same way, whether its tensors are in
// host memory or on a device:
//
// clang-format off
//   start     what can be refused at once; a layer of a planned step is launched here, and nothing else follows
//   enter     the sequences are found and marked as in flight (lib/attend/passage.h)
//   join      background work that the call needs is awaited
//   reserve   on a device, memory for the whole call
//   then for each chunk:
//     prepare   which keys, where they are, who attends them; changes nothing that others see
//     fill      rows that have to be in their places before
//     launch    append, attend, merge, observe
//     commit    lengths and windows
//     finish    what is left to do, outside all locks
// clang-format on
//
// Where a chunk fails, the call takes the earlier ones back. A planned step (lib/attend/step_plan.h) prepares, fills and
// commits a chunk of each layer when it begins, and the calls of its layers launch.
#pragma once

#include "lib/attend/device_lane.h"
#include "lib/attend/host_lane.h"

namespace tandem {

class Executor {
 public:
  explicit Executor(SessionCore& core) : core_(core), device_(core) {}

  Status attend(const AttendArgs& args);
  DeviceLane& device() { return device_; }

 private:
  Status run(Lane& lane, Call& call);
  Status run_chunk(ChunkWork& work, Call& chunk);

  SessionCore& core_;
  HostLane host_;
  DeviceLane device_;
};

}  // namespace tandem
