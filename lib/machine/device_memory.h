// SPDX-License-Identifier: MIT
// Device memory behind the interface of a tier (lib/base/memory.h).
#pragma once

#include "lib/base/memory.h"
#include "lib/machine/device_ref.h"

namespace tandem {

// Largest piece that is pinned at once, in bytes. If the system refuses to pin more, the pieces so far stay pinned. Tests
// make it smaller.
inline constinit int64_t most_pinned_bytes = int64_t{1} << 30;
// Smallest piece of the store that is pinned at once, in bytes. Tests make it smaller.
inline constinit int64_t least_pinned_bytes = int64_t{8} << 20;

// device: null if nothing will be allocated.
Allocator device_allocator(const Device* device);

// True if a block of host memory may be pinned. A block from the caller's allocator may share its first and last page with
// other blocks. Copies of those would read memory that is pinned in part, which devices refuse.
bool owns_pages(const Tier& tier, const Buffer& buffer);

}  // namespace tandem
