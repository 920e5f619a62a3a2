// SPDX-License-Identifier: MIT
// Memory of a device as that of a tier (lib/base/memory.h).
#pragma once

#include "lib/base/memory.h"
#include "lib/machine/device_ref.h"

namespace tandem {

// What is pinned is pinned in pieces of at most so much: where the system refuses more, a part has been had. Tests make it
// less.
inline constinit int64_t most_pinned_bytes = int64_t{1} << 30;
// The store is pinned in pieces of at least so much. Tests make it less.
inline constinit int64_t least_pinned_bytes = int64_t{8} << 20;

// device: null where nothing will be asked for.
Allocator device_allocator(const Device* device);

// Whether a block of the host may be pinned. Memory of the caller's allocator may share its first and last page with others,
// of which a copy would then read from memory that is pinned in part, which devices refuse.
bool owns_pages(const Tier& tier, const Buffer& buffer);

}  // namespace tandem
