// SPDX-License-Identifier: MIT
// Attend calls, from the caller's tensors to the caller's tensors. Every call takes the same steps, whether its tensors are
// in host memory or on a device:
//
// clang-format off
//   start     refuses what can be refused at once; launches a layer of a planned step, after which the call ends
//   enter     finds the sequences and marks them as in flight (lib/attend/passage.h)
//   join      waits for background work that the call needs
//   reserve   on a device, memory for the whole call
//   then for each chunk:
//     prepare   decides which keys are attended, where they are, and who attends them; changes nothing that others see
//     fill      copies rows that must be in place before the launch
//     launch    append, attend, merge, observe
//     commit    lengths and windows
//     finish    remaining work, outside all locks
// clang-format on
//
// If a chunk fails, the call rolls back its earlier chunks. A planned step (lib/attend/step_plan.h) prepares, fills and
// commits a chunk of each layer when it begins; the calls of its layers only launch.
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
