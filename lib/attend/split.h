// SPDX-License-Identifier: MIT
// Decides for each call which processor attends the keys outside the window:
//
//   take      gets buffers of the routes; for "auto", also measures bus and CPU where the engine has no rates yet
//   choose    decides for each chunk which keys move to the device and by which route, by the planner (lib/rates/planner.h)
//             or by the session's option; pins the store as far as the moved keys reach
//
// Tokens [host_begin, cpu_begin) of a sequence move to the device. The CPU attends [cpu_begin, host_end) at the same time.
// The older tokens move because the store already has them, and because the pinned tokens stay the sent ones as sequences
// grow.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Sets in call.taken which routes the call may take. If "auto" gets no memory, the keys stay with the CPU.
Status take_routes(Call& call, const CallShape& shape);
// Handles a lack of memory for the routes. With "auto", this call and all later ones leave the keys to the CPU. Otherwise
// returns `why`.
Status give_streams_up(Call& call, Status why);
// Adds parts, pieces and launches to the task, which begin_task() has reset.
void choose_routes(Call& chunk);
// Handles the result of pinning the store. Returns true to go on. Returns false, only with "auto", if no route is taken any
// more.
bool accept_pins(Call& call, bool is_pinned);
// Waits until the store has the keys that this chunk sends and an earlier call has appended.
void wait_for_sent_rows(const Call& chunk);

}  // namespace tandem
