// SPDX-License-Identifier: MIT
// The routes by which a call's keys outside the windows may come to the device. A call decides on them before it reserves
// memory. A memory plan assumes the same decision.
#pragma once

#include <algorithm>
#include <array>

#include "lib/call/reserve.h"
#include "lib/routes/prefill_size.h"

namespace tandem {

struct RoutesTaken {
  std::array<bool, kMostRoutes> uses{};  // by index in the table
  StreamLayout layout;                   // of pieces of K and V
  PrefillSize prefill;                   // of long appends; n_tokens is 0 if there are none

  bool any() const { return std::find(uses.begin(), uses.end(), true) != uses.end(); }
};

// Decides by the session's options and the shape alone (lib/attend/split.cc). With "auto", a route is possible if planning
// it is worthwhile, though the plan may then find the CPU faster. Long appends are not sized here.
RoutesTaken possible_routes(const SizeTerms& terms, const CallShape& shape);

// Returns the memory of all chunks of a call.
Reservation reserve_call(const SizeTerms& terms, const CallShape& shape, const RoutesTaken& taken);

}  // namespace tandem
