// SPDX-License-Identifier: MIT
// Calls on device tensors. They go in chunks, of which each has a ticket (lib/tables/device.h), and return when all is on
// its way:
//
// clang-format off
//   reserve    memory of all kinds for the whole call
//   prepare    which keys, where they are, who attends to those outside the window; the task: what the host's part computes,
//              where the new rows go
//   fill       what the window should have and has not, after appends on the host, forks, truncations: from the store
//   launch     first pieces of the routes | append | post the task | attend to the window | to the other pieces, in the order of
//              the task's launches | merge, where the host has a part | observe, where attention weights are kept
//   commit     lengths
// clang-format on
//
// A call waits for the device where memory has to grow, a window to be filled, or more tasks are under way than there is
// room for. Long appends whose keys cross the bus are chunks of another kind (lib/attend/long_append.h).
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

  // state: what the session knows of the sequence. The cache's mutex is held exclusively.
  Status take_state(const Call& call, SequenceState& state, SequenceCall* of) const;

 private:
  Status launch_planned(Call& call, bool captures);
  Status hold(Call& call, const CallShape& shape);
  Status reserve_sequences(Call& call, CallShape* shape);

  LongAppend long_append_;
};

}  // namespace tandem
