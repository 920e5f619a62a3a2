// SPDX-License-Identifier: MIT
// Which routes the keys outside the windows of a call may take, beside the CPU's. A call decides this before it reserves
// memory; a memory plan assumes it.
#pragma once

#include <algorithm>
#include <array>

#include "lib/call/reserve.h"
#include "lib/routes/prefill_size.h"

namespace tandem {

struct RoutesTaken {
  std::array<bool, kMostRoutes> uses{};  // routes of the table
  StreamLayout layout;                   // of pieces of K and V
  PrefillSize prefill;                   // of long appends; n_tokens is 0 where there are none

  bool any() const { return std::find(uses.begin(), uses.end(), true) != uses.end(); }
};

// By what the session was asked for and by the shape alone (lib/attend/split.cc). "auto" takes a route where it is worth
// planning; the call may find the CPU faster. Long appends are not sized here.
RoutesTaken possible_routes(const SizeTerms& terms, const CallShape& shape);

// The memory of all of a call's chunks.
Reservation reserve_call(const SizeTerms& terms, const CallShape& shape, const RoutesTaken& taken);

}  // namespace tandem
