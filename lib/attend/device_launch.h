// SPDX-License-Identifier: MIT
// What calls ask of the device's module: one function for each kind of kernel, with the call's tensors and descriptors.
#pragma once

#include "lib/attend/call.h"
#include "lib/base/trace.h"
#include "lib/machine/device_status.h"

namespace tandem {

template <typename Function, typename DeviceCall>
Status ask_device(const Call& call, const char* name, Function function, const DeviceCall* args) {
  const TraceRange range(name, call.args.layer_idx, "resident");
  return call_device(call.device().device(), function, args, call.args.stream);
}

// A task that has nothing to do but to meet a ticket of the chunk's sequences.
void begin_task(const Call& chunk, HandOverTask* task);

// Rows and queries of the call.
DeviceAppend append_of(const Call& call, const DeviceSequences& sequences);
// The queries that are attended: append has left them rotated where keys are.
DeviceRows attended_q(const DeviceAppend& append);
// The window, or a long append's window and chunk, for a run of heads. layer: becomes theirs.
DeviceAttend of_run(const Call& call, const DeviceAttend& window, const HeadRun& run, Layer* layer);
// The answer of heads from first_head on goes to the caller's tensors.
void point_output(const Call& call, int32_t first_head, DeviceAttend* attend);
// The window, a run of heads of one kind after the other. is_last: the answer is left, and no states.
Status attend_window(const Call& call, const DeviceAttend& window, bool is_last);
// The pieces of the task's launches, whose states are added to those of the window in the session's o() and lse().
Status attend_pieces(const Call& chunk, const DeviceAttend& window);
Status merge_and_observe(const Call& call, const DeviceAppend& append);
// lse: of the call's rows, [n_tokens, n_q_heads].
Status observe(const Call& call, const DeviceAppend& append, const float* lse);

}  // namespace tandem
