// SPDX-License-Identifier: MIT
// What all chunks on device tensors do, whether they are of a decode, of a long append or of a planned step. The cache's
// mutex is held exclusively.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Where the window begins before the chunk. A session may find a sequence long: its window is not to hold all of it. The
// state follows when the chunk is committed.
void evict_before(const Call& chunk, SequenceCall* of);
// Copies of what the ticket's host part needs, while the sequences cannot grow.
void prepare_selection(const Call& chunk);
// Lengths and windows. Nothing of the chunk can be lost before the next chunk is prepared.
void commit_sequences(Call& chunk);

}  // namespace tandem
