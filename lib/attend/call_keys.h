// SPDX-License-Identifier: MIT
// Which keys the queries of a call see, and which of these are in the window, on the host, or still to be selected.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

void clear_visibility(AttendScratch& scratch);
// One sequence of the call, whose lengths and window are set. CANCELLED.
Status see_keys(const Call& call, SequenceCall& of);
// Causal order alone.
Status set_visibility(const Call& call, SequenceCall& of);
// When all sequences have been seen: the vectors that they point to have grown to their end.
void point_visibility(AttendScratch& scratch);

}  // namespace tandem
