// SPDX-License-Identifier: MIT
// Who computes over the keys outside the window, call by call:
//
//   take      buffers of the routes; for "auto", what bus and CPU take is measured where the engine does not know it yet
//   choose    of a chunk: which keys move to the device and by which route, as the planner says (lib/rates/planner.h) or as
//   the
//             session was told; the store pinned as far as these reach
//
// Of a sequence, tokens [host_begin, cpu_begin) move to the device and [cpu_begin, host_end) are the CPU's, at the same
// time. The older ones move: the store has them for long, and what is pinned stays what is sent as sequences grow.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Says in call.taken which routes the call may take. Memory that "auto" cannot have leaves the keys with the CPU.
Status take_routes(Call& call, const CallShape& shape);
// There was no memory for what the routes need: of "auto", the call takes none, and the session takes none any more.
Status give_streams_up(Call& call, Status why);
// The task, as begin_task() leaves it, gets its parts, pieces and launches.
void choose_routes(Call& chunk);
// Whether the store could be pinned for copies; false: "auto" is to leave it.
bool accept_pins(Call& call, bool is_pinned);
// A call waits for the device only where the store does not have the keys yet that an earlier call has appended and this one
// has to send.
void wait_for_sent_rows(const Call& chunk);

}  // namespace tandem
