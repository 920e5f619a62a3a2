// SPDX-License-Identifier: MIT
// Calls whose keys the caller names (tandem_selection in selection.h), up to their kernels.
//
// On host tensors the CPU attends them all (lib/call/named_jobs.h). On device tensors each query is described as a sequence
// of its own, and a kernel makes its key lists of the indices: of what the window has. The indices go to the host with the
// queries, and the CPU attends the named keys that the window does not have. Indices that are in host memory are checked,
// and copied to the device; those in device memory are looked at by the kernel and by the CPU alone, so a wrong one is
// told by a later call.
//
//   work space    key lists | granules | indices that came from host memory
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// UNSUPPORTED (selection): another policy than "all", streaming heads, groups that no kernel with lists serves.
Status check_named_layer(const Call& call);
// Indices in host memory: checks them, and copies rows that may stand in any order into order. INVALID_ARGUMENT
// (selection.idx). Indices in device memory come to the host, which waits for the stream, if they may stand in any order or
// if appends are long enough for chunks with lists of tiles (named_tiles.h); others stay as they are, unchecked.
Status take_named(Call& call);
// Adds the sizes that the indices of a call on device tensors have to its shape.
void size_named(const Call& call, CallShape* shape);
// Of a call of a planned step that names keys. UNSUPPORTED (selection), CAPACITY (selection.idx.shape).
Status check_named_in_step(const Call& call);
// The rows of a chunk's indices, from row first_row of the call's on.
DeviceIndices indices_of(const NamedKeys& named, int64_t first_row);
// Copies indices that are in host memory to the device.
Status send_indices(Call& chunk);
// Makes the call's key lists of its indices.
Status name_keys(Call& call, const DeviceSequences& sequences);

}  // namespace tandem
