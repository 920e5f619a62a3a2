// SPDX-License-Identifier: MIT
// Who computes over the keys outside the window, call by call:
//
//   take      buffers of the routes; for "auto", what bus and CPU take is measured where the engine does not know it yet
//   choose    for each chunk: which keys move to the device and by which route, by the planner (lib/rates/planner.h) or
//             by the session's option; the store is pinned as far as the moved keys reach
//
// Of a sequence, tokens [host_begin, cpu_begin) move to the device and [cpu_begin, host_end) are the CPU's, at the same
// time. The older ones move: the store has them for long, and what is pinned stays what is sent as sequences grow.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Says in call.taken which routes the call may take. Memory that "auto" cannot have leaves the keys with the CPU.
Status take_routes(Call& call, const CallShape& shape);
// There is no memory for the routes. With "auto" the call and all later ones leave the keys to the CPU; else `why` is
// returned.
Status give_streams_up(Call& call, Status why);
// Adds parts, pieces and launches to the task that begin_task() has reset.
void choose_routes(Call& chunk);
// What to do after pinning the store. True: go on. False, with "auto" alone: no route is taken any more.
bool accept_pins(Call& call, bool is_pinned);
// Waits until the store has the keys that this chunk sends and that an earlier call has appended.
void wait_for_sent_rows(const Call& chunk);

}  // namespace tandem
