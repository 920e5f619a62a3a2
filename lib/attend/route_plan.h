// SPDX-License-Identifier: MIT
// tandem_plan(): predicts who would compute over the keys of a call, with the same code as calls.
#pragma once

#include "lib/attend/session_core.h"
#include "lib/call/call_args.h"

namespace tandem {

// Fills all but struct_size. UNSUPPORTED, INVALID_ARGUMENT.
Status plan_route(SessionCore& session, const CallsAhead& calls, tandem_route_plan* plan);

}  // namespace tandem
