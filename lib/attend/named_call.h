// SPDX-License-Identifier: MIT
// Calls whose keys the caller names (tandem_selection in selection.h), up to the launch of their kernels.
//
// On host tensors the CPU attends all named keys (lib/call/named_jobs.h). On device tensors each query is described as a
// sequence of its own. A kernel makes its key lists from the indices, as far as the window has the keys. The host gets the
// indices with the queries, and the CPU attends the named keys outside the window. Indices in host memory are checked and
// copied to the device. Indices in device memory are only checked by the kernel and by the CPU, so a later call reports a
// wrong one.
//
//   work space    key lists | granules | indices that came from host memory
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// UNSUPPORTED (selection): a policy other than "all", streaming heads, or groups too large for kernels with lists.
Status check_named_layer(const Call& call);
// Takes the caller's indices. Indices in host memory are checked, and sorted copies are made of rows in any order.
// INVALID_ARGUMENT (selection.idx). Indices in device memory are brought to the host, which waits for the stream, if they
// may be in any order or if appends are long enough for chunks with lists of tiles (named_tiles.h). Others stay unchecked.
Status take_named(Call& call);
// Adds the sizes that the indices of a call on device tensors have to its shape.
void size_named(const Call& call, CallShape* shape);
// Checks a call of a planned step that names keys. UNSUPPORTED (selection), CAPACITY (selection.idx.shape).
Status check_named_in_step(const Call& call);
// Returns the rows of a chunk's indices, from row first_row of the call on.
DeviceIndices indices_of(const NamedKeys& named, int64_t first_row);
// Copies indices that are in host memory to the device.
Status send_indices(Call& chunk);
// Launches the kernel that makes the call's key lists from its indices.
Status name_keys(Call& call, const DeviceSequences& sequences);

}  // namespace tandem
