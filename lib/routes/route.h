// SPDX-License-Identifier: MIT
// Who computes over the keys outside the window, in calls on device tensors: what a session was asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/policies/policy.h"

namespace tandem {

enum class Route {
  kAuto,       // each call the one that the engine's measurements say takes less time (lib/routes/route_costs.h)
  kHost,       // the CPU, where the keys are
  kStream,     // the device, as they cross the bus (lib/routes/stream.cc)
  kRecompute,  // likewise, or made of hidden states that cross it (lib/routes/recompute.cc)
};

// Session options with defaults filled in.
struct RouteOptions {
  Route route = Route::kAuto;
  int64_t buffer_bytes = int64_t{16} << 20;  // of each stream buffer
  double share = 1.0;                        // with kRecompute: of the keys outside the window

  bool streams_keys() const { return route != Route::kRecompute || share < 1.0; }              // if anything crosses the bus
  bool is_by_device() const { return route == Route::kStream || route == Route::kRecompute; }  // whatever it costs
};

// NOT_FOUND, INVALID_ARGUMENT, and UNSUPPORTED where the policy leaves nothing to stream or the library rotates keys.
Status resolve_route_options(const tandem_session_options& options, const Policy& policy, const std::vector<Layer>& layers,
                             RouteOptions* resolved);

// Only keys that are attended in full and whose weights nobody counts on the host can leave it unseen.
inline bool can_stream(const Policy& layer_policy) {
  return !layer_policy.keeps_maw && layer_policy.host_keys(false) == HostKeys::kAll &&
         layer_policy.host_keys(true) == HostKeys::kAll;
}

}  // namespace tandem
