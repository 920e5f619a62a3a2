// SPDX-License-Identifier: MIT
// Decides which keys the queries of a call see, and whether these are in the window, on the host, or still to be selected.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

void clear_visibility(AttendScratch& scratch);
// Sets the keys of one sequence of the call, whose lengths and window are set. CANCELLED.
Status see_keys(const Call& call, SequenceCall& of);
// Sets causal order and the sliding window only.
Status set_visibility(const Call& call, SequenceCall& of);
// Sets the pointers into the vectors of `scratch`. Called once all sequences have been seen, as the vectors grow until then.
void point_visibility(AttendScratch& scratch);

}  // namespace tandem
