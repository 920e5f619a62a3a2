// SPDX-License-Identifier: MIT
// Writes the descriptors of a chunk's sequences for kernels: ranges of keys, key lists, page tables, positions.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Both write to host memory that is then copied to the device. Page tables are contiguous, in the order of the sequences.
// describe_tables() returns the number of entries.
void describe_sequences(const Call& chunk, DeviceSequence* to);
int64_t describe_tables(const Call& chunk, int64_t* to);
// Returns the descriptors of a planned step for the call's layer, at their addresses on the device.
DeviceSequences step_sequences(const Call& call);
// Writes the key list of each KV head, [n_sequences][n_kv_heads], where heads stream or have patterns. n_sequences: how many
// there is room for. Returns the number of entries of sizeof(DeviceKeys) written.
int64_t describe_lists(const Call& chunk, DeviceKeys* to, int64_t n_sequences);
// Returns the same lists at their device address `place`.
DeviceLists lists_at(const Call& chunk, const std::byte* place, int64_t n_sequences);
// Writes the lists to `upload` and points chunk.lists to their device address `there`. Returns the number of bytes written.
int64_t describe_lists_at(Call& chunk, std::byte* upload, const std::byte* there);
// Uploads all descriptors of a chunk in one copy: sequences, queries that are described one by one, pieces of the routes.
Status upload_descriptors(Call& chunk, DeviceSequences* sequences);

}  // namespace tandem
