// SPDX-License-Identifier: MIT
// What long appends take on this device (lib/routes/prefill_size.h): once in an engine for a shape of layer, when a plan is
// first asked about one. A quarter of a second, and memory that is given back: queries of a tile for each multiprocessor,
// some thousand keys of two KV heads.
#pragma once

#include "lib/base/memory.h"
#include "lib/machine/device_owner.h"
#include "lib/model/layer.h"

namespace tandem {

// *tile_ns: of a block's step over a tile of query rows and keys; 0 where the module has no kernels for such calls.
Status try_prefill(const Device& device, Tier& device_tier, const Layer& layer, double* tile_ns);

}  // namespace tandem
