// SPDX-License-Identifier: MIT
// What kernels read of a chunk's sequences: ranges of keys, key lists, page tables, positions.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Written here for the copy to a place on the device. Page tables lie one behind the other, in the order of the sequences;
// describe_tables() returns how many entries these are.
void describe_sequences(const Call& chunk, DeviceSequence* to);
int64_t describe_tables(const Call& chunk, int64_t* to);
// Those of a planned step, of the call's layer, as kernels see them.
DeviceSequences step_sequences(const Call& call);
// Writes the key list of each KV head, [n_sequences][n_kv_heads]; nothing if no head streams. Returns how many.
int64_t describe_lists(const Call& chunk, DeviceKeys* to);
// The same lists as kernels see them at `place`.
DeviceLists lists_at(const Call& chunk, const std::byte* place);
// All of a chunk, in one copy: its sequences, its queries where each is described by itself, the pieces of its routes.
Status upload_descriptors(Call& chunk, DeviceSequences* sequences);

}  // namespace tandem
