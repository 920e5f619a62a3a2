// SPDX-License-Identifier: MIT
// What kernels read of a chunk's sequences: ranges of keys, page tables, positions.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Written here for the copy to a place on the device; page tables from entry *n_entries on.
void describe_sequences(const Call& chunk, DeviceSequence* to, int64_t* tables, int64_t* n_entries);
// The same descriptors once more, with the streaming heads' first keys.
void describe_streaming_heads(const Call& chunk, const DeviceSequence* all, DeviceSequence* to);
// All of a chunk, in one copy: its sequences, the queries of a guess, the pieces of its routes.
Status upload_descriptors(Call& chunk, DeviceSequences* sequences);

}  // namespace tandem
