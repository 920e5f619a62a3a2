// SPDX-License-Identifier: MIT
// Calls on device tensors. They are cut into chunks, each with a ticket (lib/tables/device.h), and return once all work is
// launched:
//
// clang-format off
//   reserve    all memory of the whole call
//   prepare    decides which keys are attended, where they are, and who attends those outside the window; fills the task: jobs
//              of the host part, places of the new rows
//   fill       copies rows that the window lacks after appends on the host, forks or truncations, from the store
//   launch     first pieces of the routes | append | post the task | attend the window | attend the other pieces, in the order
//              of the task's launches | merge, where the host has a part | observe, where attention weights are kept
//   commit     lengths
// clang-format on
//
// A call waits for the device if memory has to grow, if a window has to be filled, or if the ring of tasks is full. Long
// appends whose keys cross the bus are chunks of another kind (lib/attend/long_append.h).
#pragma once

#include "lib/attend/lane.h"
#include "lib/attend/long_append.h"

namespace tandem {

class DeviceLane final : public Lane {
 public:
  explicit DeviceLane(SessionCore& core) : long_append_(core) {}

  Status start(Call& call, bool* was_launched) override;
  Status reserve(Call& call) override;
  Status next_chunk(Call& call, ChunkPlace* place, Chunk* chunk) override;
  Status prepare(Call& chunk) override;
  Status fill(Call& chunk) override;
  Status launch(Call& chunk) override;
  Status commit(Call& chunk) override;
  Status take_back(Call& call, Status why) override;

  // Points *of to `state`, which the session keeps for the sequence. The cache's mutex is held exclusively.
  Status take_state(const Call& call, SequenceState& state, SequenceCall* of) const;

 private:
  Status launch_planned(Call& call, bool captures);
  Status hold(Call& call, const CallShape& shape);
  Status reserve_sequences(Call& call, CallShape* shape);

  LongAppend long_append_;
};

}  // namespace tandem
