// SPDX-License-Identifier: MIT
// The routes, beside the CPU's, that the keys outside the windows of a call may take. A call decides this before it reserves
// memory. A memory plan assumes it.
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

// Decides by the session's options and the shape alone (lib/attend/split.cc). "auto" takes a route if planning it is
// worthwhile. The call may then find the CPU faster. Long appends are not sized here.
RoutesTaken possible_routes(const SizeTerms& terms, const CallShape& shape);

// Returns the memory of all chunks of a call.
Reservation reserve_call(const SizeTerms& terms, const CallShape& shape, const RoutesTaken& taken);

}  // namespace tandem
