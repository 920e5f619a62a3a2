// SPDX-License-Identifier: MIT
// Calls of the device's module: one function for each kind of kernel, with the call's tensors and descriptors.
#pragma once

#include "lib/attend/call.h"
#include "lib/base/trace.h"
#include "lib/machine/device_status.h"

namespace tandem {

// Resets the task, which then only waits for its ticket.
void begin_task(const Call& chunk, HandOverTask* task);

// Resets the task of a layer that follows an earlier layer of a planned step. `first`: the earlier layer's task, which
// leaves its calls in *shared before the tasks are posted.
void share_task(const Call& like, HandOverTask& first, const StepCalls* shared);

// Sends the first pieces of the routes, before anything else of the chunk is launched.
Status begin_routes(const Call& chunk);
// Returns the append of the call's rows and queries.
DeviceAppend append_of(const Call& call, const DeviceSequences& sequences);
Status launch_append(const Call& call, const DeviceAppend& append);
// Returns the queries that attend() reads: those that append() has rotated, where the layer rotates.
DeviceRows attended_q(const DeviceAppend& append);
// Returns where the answer of heads from first_head on goes: the caller's tensors.
DeviceOutput output_of(const Call& call, int32_t first_head);
void point_to(const DeviceOutput& output, DeviceAttend* attend);
// Returns the attention over the window. merges: states go to the session's o() and lse(), else to the caller's o and lse.
DeviceAttend window_of(const Call& call, const DeviceAppend& append, bool merges);
Status attend_window(const Call& call, const DeviceAttend& window);
// Attends the pieces of the task's launches. Adds their states to the window's in the session's o() and lse().
Status attend_pieces(const Call& chunk, const DeviceAttend& window);
struct MergeWork {
  bool leaves_finished = false;   // attend() has finished the rows of sequences without a host part
  bool waits_for_append = false;  // no earlier kernel has waited for the append's end
};
Status merge_and_observe(const Call& call, const DeviceAppend& append, const MergeWork& work);
// lse: of the call's rows, [n_tokens, n_q_heads].
Status observe(const Call& call, const DeviceAppend& append, const float* lse);

}  // namespace tandem
