// SPDX-License-Identifier: MIT
// Who computes over the keys outside the window, in calls on device tensors: what a session was asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/planes.h"
#include "lib/select/policy.h"

namespace tandem {

enum class Route {
  kAuto,        // as takes the least time by the engine's measurements (lib/routes/call_plan.h)
  kHost,        // the CPU, where the keys are
  kStream,      // the device, as they cross the bus (lib/routes/stream.cc)
  kHostStream,  // both: a share of each sequence's keys crosses the bus
  kRecompute,   // as kStream, or made of hidden states that cross the bus (lib/routes/recompute.cc)
};
const char* name_of(Route route);  // as sessions are asked for it

// Session options with defaults filled in.
struct RouteOptions {
  Route route = Route::kAuto;
  int64_t buffer_bytes = int64_t{16} << 20;  // of each stream buffer
  double stream_share = 0.0;                 // of kHostStream
  double rebuilt_share = 1.0;                // of kRecompute: of the keys outside the window
  int64_t append_tokens = 0;                 // of a long append that are attended at once, at most; 0: kMostAppend
  int32_t piece_heads = 0;                   // KV heads of a piece, at most; 0: as many as take least time

  // The device has keys of the host's whatever it costs; so large a share of them.
  bool always_streams() const { return route != Route::kAuto && route != Route::kHost; }
  // Long appends have all their queries meet a key at once (lib/routes/prefill.cc).
  bool appends_at_once() const { return route == Route::kAuto || route == Route::kStream; }
  bool plans_steps() const { return !always_streams(); }  // copies in a graph could not follow a sequence that grows
  double given_share() const { return route == Route::kHostStream ? stream_share : 1.0; }
  bool streams_keys() const { return route != Route::kRecompute || rebuilt_share < 1.0; }  // if anything crosses the bus
};

// NOT_FOUND, INVALID_ARGUMENT, and UNSUPPORTED where the policy leaves nothing to stream or the library rotates keys.
Status resolve_route_options(const tandem_session_options& options, const LayerPolicies& policies,
                             const std::vector<Layer>& layers, RouteOptions* resolved);

// Keys that queries attend in full can cross the bus. Those that a policy chooses for a query, head by head, are the host's.
inline bool can_stream(const Policy& layer_policy, bool is_append) {
  return layer_policy.host_keys(is_append) == HostKeys::kAll;
}

// K and V of a token, in all KV heads.
inline int64_t token_kv_bytes(const Layer& layer) { return layer.n_kv_heads * plane_bytes(layer).total(); }

}  // namespace tandem
