// SPDX-License-Identifier: MIT
// Who computes over the keys outside the window, in calls on device tensors: what a session was asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/policy/policy.h"
#include "lib/rates/planner.h"
#include "lib/tables/planes.h"

namespace tandem {

// Session options with defaults filled in.
struct RouteOptions {
  enum class Choice {
    kAuto,   // as takes the least time by the engine's measurements (lib/call/call_plan.h)
    kHost,   // the CPU, where the keys are
    kGiven,  // a share of each sequence's keys takes a route of the table (lib/routes/route_table.cc)
  };
  Choice choice = Choice::kAuto;
  const char* name = "auto";   // as the session was asked for it
  size_t route = 0;            // of kGiven: index in the table
  bool has_share = false;      // "host+stream"
  double moved_share = 1.0;    // of kGiven: what moves of the keys outside the window
  double rebuilt_share = 1.0;  // of the route "recompute": what is made of hidden states, of the keys that move
  int64_t buffer_bytes = int64_t{16} << 20;  // of each stream buffer
  int64_t append_tokens = 0;                 // of a long append that are attended at once, at most; 0: kMostAppend
  int32_t piece_heads = 0;                   // KV heads of a piece, at most; 0: as many as take least time

  bool is_auto() const { return choice == Choice::kAuto; }
  bool is_host() const { return choice == Choice::kHost; }
  bool is_given() const { return choice == Choice::kGiven; }  // the device has keys of the host's whatever it costs
  bool asks_for(size_t idx) const { return is_given() && route == idx; }
  // Long appends have all their queries meet a key at once (lib/attend/long_append.cc).
  bool appends_at_once() const { return is_auto() || (asks_for(kPlanStream) && !has_share); }
  bool plans_steps() const { return !is_given(); }  // copies in a graph could not follow a sequence that grows
  // Whether any of the moved keys take the route: by a plan they may.
  bool may_take(size_t idx) const {
    if (is_auto()) return idx < static_cast<size_t>(kPlanColumns);  // others are taken where a session asks for them
    if (asks_for(kPlanRecompute)) return idx == kPlanRecompute || (idx == kPlanStream && rebuilt_share < 1.0);
    return asks_for(idx);
  }
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
