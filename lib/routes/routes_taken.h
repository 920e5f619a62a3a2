// SPDX-License-Identifier: MIT
// Which routes the keys outside the windows of a call may take, beside the CPU's. A call decides this before it reserves
// memory; a memory plan assumes it.
#pragma once

#include "lib/routes/prefill_size.h"

namespace tandem {

struct RoutesTaken {
  bool streams = false;                          // keys cross the bus, in one form or another
  bool rebuilds = false;                         // hidden states do
  StreamLayout layout;                           // of pieces of K and V
  PrefillSize prefill;                           // of long appends; n_tokens is 0 where there are none
  const DeviceProjection* projection = nullptr;  // where keys are rebuilt
};

// By what the session was asked for and by the shape alone (lib/routes/choose.cc). "auto" takes a route where it is worth
// planning; the call may find the CPU faster. Long appends are not sized here.
RoutesTaken possible_routes(const SizeTerms& terms, const CallShape& shape);

}  // namespace tandem
