// SPDX-License-Identifier: MIT
// What kernels read of a chunk's sequences: ranges of keys, page tables, positions.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Written here for the copy to a place on the device; page tables from entry *n_entries on.
void describe_sequences(const Call& chunk, DeviceSequence* to, int64_t* tables, int64_t* n_entries);
// What each KV head attends, in a layer whose heads differ: [n_sequences][n_kv_heads]. Returns how many it has written.
int64_t describe_lists(const Call& chunk, DeviceKeys* to);
// These lists, at their place on the device.
DeviceLists lists_at(const Call& chunk, const std::byte* place);
// All of a chunk, in one copy: its sequences, the queries of a guess, the pieces of its routes.
Status upload_descriptors(Call& chunk, DeviceSequences* sequences);

}  // namespace tandem
