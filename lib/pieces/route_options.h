// SPDX-License-Identifier: MIT
// Session options about the keys outside the window in calls on device tensors: which processor attends them, and by which
// route they move.
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
    kAuto,   // the split that takes the least time by the engine's measurements (lib/call/call_plan.h)
    kHost,   // the CPU, where the keys are
    kGiven,  // a share of each sequence's keys takes a route of the table (lib/routes/route_table.cc)
  };
  Choice choice = Choice::kAuto;
  const char* name = "auto";                 // as the caller named it
  size_t route = 0;                          // for kGiven: index in the table
  bool has_share = false;                    // "host+stream"
  double moved_share = 1.0;                  // for kGiven: share of the keys outside the window that moves
  double rebuilt_share = 1.0;                // for the route "recompute": share of the moving keys that is made
  int64_t buffer_bytes = int64_t{16} << 20;  // of each stream buffer
  int64_t append_tokens = 0;                 // longest chunk of a long append; 0: kMostAppend
  int32_t piece_heads = 0;                   // limit of KV heads of a piece; 0: the number that takes the least time

  bool is_auto() const { return choice == Choice::kAuto; }
  bool is_host() const { return choice == Choice::kHost; }
  bool is_given() const { return choice == Choice::kGiven; }  // the device gets keys of the host whatever the time
  bool asks_for(size_t idx) const { return is_given() && route == idx; }
  // True if all queries of a long append's chunk meet a key at once (lib/attend/long_append.cc).
  bool appends_at_once() const { return is_auto() || (asks_for(kPlanStream) && !has_share); }
  bool plans_steps() const { return !is_given(); }  // copies in a graph could not follow a sequence that grows
  // True if some of the moving keys may take the route. Under "auto" a plan may choose any of its columns.
  bool may_take(size_t idx) const {
    if (is_auto()) return idx < static_cast<size_t>(kPlanColumns);  // other routes are used only on request
    if (asks_for(kPlanRecompute)) return idx == kPlanRecompute || (idx == kPlanStream && rebuilt_share < 1.0);
    return asks_for(idx);
  }
};

// NOT_FOUND, INVALID_ARGUMENT, and UNSUPPORTED if the policy leaves no keys to stream or the library rotates keys.
Status resolve_route_options(const tandem_session_options& options, const LayerPolicies& policies,
                             const std::vector<Layer>& layers, RouteOptions* resolved);

// True if keys outside the window can cross the bus: queries attend them all. Keys that a policy selects head by head stay
// with the CPU.
inline bool can_stream(const Policy& layer_policy, bool is_append) {
  return layer_policy.host_keys(is_append) == HostKeys::kAll;
}

// Bytes of K and V of a token, over all KV heads.
inline int64_t token_kv_bytes(const Layer& layer) { return layer.n_kv_heads * plane_bytes(layer).total(); }

}  // namespace tandem
