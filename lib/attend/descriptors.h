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
// Writes the key list of each KV head, [n_sequences][n_kv_heads], where heads stream or have patterns; n_sequences: that
// there is room for. Returns how many entries of this size have been written.
int64_t describe_lists(const Call& chunk, DeviceKeys* to, int64_t n_sequences);
// The same lists as kernels see them at `place`.
DeviceLists lists_at(const Call& chunk, const std::byte* place, int64_t n_sequences);
// Both of a chunk, whose lists are these then. Returns how many bytes have been written.
int64_t describe_lists_at(Call& chunk, std::byte* upload, const std::byte* there);
// All of a chunk, in one copy: its sequences, its queries where each is described by itself, the pieces of its routes.
Status upload_descriptors(Call& chunk, DeviceSequences* sequences);

}  // namespace tandem
