// SPDX-License-Identifier: MIT
// Measures what the engine's profile lacks for calls of a shape and number of queries (lib/rates/profile.h): copies to the
// device, the CPU over keys of its own, and both at once. Some ms, once for each.
#pragma once

#include <cstdint>

#include "lib/machine/engine.h"

namespace tandem {

// most_bytes: of a copy. Needs as many in the device's tier, and up to 64 MiB of host memory for keys.
Status try_routes(Engine& engine, Tier& device_tier, const Layer& layer, int64_t n_queries, int64_t most_bytes);

}  // namespace tandem
