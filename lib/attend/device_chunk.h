// SPDX-License-Identifier: MIT
// What all chunks on device tensors do, whether they are of a decode, of a long append or of a planned step. The cache's
// mutex is held exclusively.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Evicts tokens that were appended without this session, so that the window need not hold them. The state changes in
// commit_sequences().
void evict_before(const Call& chunk, SequenceCall* of);
// Copies of what the ticket's host part needs, while the sequences cannot grow.
void prepare_selection(const Call& chunk);
// Sets lengths and windows. If the chunk is lost later, the cache rolls it back by the task's list of touched sequences.
void commit_sequences(Call& chunk);

}  // namespace tandem
