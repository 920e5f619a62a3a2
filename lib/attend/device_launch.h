// SPDX-License-Identifier: MIT
// What calls ask of the device's module: one function for each kind of kernel, with the call's tensors and descriptors.
#pragma once

#include "lib/attend/call.h"
#include "lib/base/trace.h"
#include "lib/machine/device_status.h"

namespace tandem {

// Resets the task: so far it only waits for its ticket.
void begin_task(const Call& chunk, HandOverTask* task);

// Likewise of a layer of a step that is planned like an earlier one, whose task is `first` and who leaves its calls in
// *shared before the tasks are posted.
void share_task(const Call& like, HandOverTask& first, const StepCalls* shared);

// First pieces of the routes, before anything else of the chunk is launched.
Status begin_routes(const Call& chunk);
// Rows and queries of the call.
DeviceAppend append_of(const Call& call, const DeviceSequences& sequences);
Status launch_append(const Call& call, const DeviceAppend& append);
// The queries that attend() reads: append() has rotated them where the layer rotates.
DeviceRows attended_q(const DeviceAppend& append);
// The answer of heads from first_head on goes to the caller's tensors.
DeviceOutput output_of(const Call& call, int32_t first_head);
void point_to(const DeviceOutput& output, DeviceAttend* attend);
// Attention over the window. merges: it leaves states in the session's o() and lse(), else the caller's o and lse.
DeviceAttend window_of(const Call& call, const DeviceAppend& append, bool merges);
Status attend_window(const Call& call, const DeviceAttend& window);
// The pieces of the task's launches, whose states are added to those of the window in the session's o() and lse().
Status attend_pieces(const Call& chunk, const DeviceAttend& window);
struct MergeWork {
  bool leaves_finished = false;   // attend() has finished the rows of sequences without a host part
  bool waits_for_append = false;  // no kernel before it has waited for the append's end
};
Status merge_and_observe(const Call& call, const DeviceAppend& append, const MergeWork& work);
// lse: of the call's rows, [n_tokens, n_q_heads].
Status observe(const Call& call, const DeviceAppend& append, const float* lse);

}  // namespace tandem
