// SPDX-License-Identifier: MIT
// Functions for every chunk on device tensors: of a decode, a long append or a planned step. The cache's mutex is held
// exclusively.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Evicts tokens that were appended without this session, so the window need not hold them. The state's window begin changes
// later, in commit_sequences().
void evict_before(const Call& chunk, SequenceCall* of);
// Makes the copies for the ticket's host part, while the sequences cannot grow.
void prepare_selection(const Call& chunk);
// Sets lengths and windows. If the chunk is lost later, the cache rolls it back by the task's list of touched sequences.
void commit_sequences(Call& chunk);

}  // namespace tandem
