// SPDX-License-Identifier: MIT
// Measures the rates that the engine's profile lacks for a shape and number of queries (lib/rates/profile.h): copies to the
// device, the CPU over keys of the trial's own, and both at once. This takes some ms, once for each shape and power of two
// of queries.
#pragma once

#include <cstdint>

#include "lib/machine/engine.h"

namespace tandem {

// most_bytes: largest copy. The trial needs this much in the device's tier, and up to 64 MiB of host memory for keys.
Status try_routes(Engine& engine, Tier& device_tier, const Layer& layer, int64_t n_queries, int64_t most_bytes);

}  // namespace tandem
