// SPDX-License-Identifier: MIT
// Measures long appends on this device (lib/routes/prefill_size.h). It runs once per engine and shape of layer, when a plan
// first needs the result. It takes a quarter of a second, and memory that is freed afterwards: queries of a tile for each
// multiprocessor, and some thousand keys of two KV heads.
#pragma once

#include "lib/base/memory.h"
#include "lib/machine/device_owner.h"
#include "lib/model/layer.h"

namespace tandem {

// *tile_ns: time of a block's step over a tile of query rows and keys; 0 if the module has no kernels for such calls.
Status try_prefill(const Device& device, Tier& device_tier, const Layer& layer, double* tile_ns);

}  // namespace tandem
