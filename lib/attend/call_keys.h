// SPDX-License-Identifier: MIT
// Decides which keys the queries of a call see, and whether these are in the window, on the host, or still to be selected.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

void clear_visibility(AttendScratch& scratch);
// Sets the keys that one sequence of the call attends. Its lengths and window are set already. CANCELLED.
Status see_keys(const Call& call, SequenceCall& of);
// Sets causal order and the sliding window only.
Status set_visibility(const Call& call, SequenceCall& of);
// Sets the pointers into the vectors of `scratch`. Called after see_keys() of all sequences, as the vectors grow until then.
void point_visibility(AttendScratch& scratch);

}  // namespace tandem
