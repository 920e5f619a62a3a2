// SPDX-License-Identifier: MIT
#include "lib/routes/routes_taken.h"

namespace tandem {

Reservation reserve_call(const SizeTerms& terms, const CallShape& shape, const RoutesTaken& taken) {
  Reservation needs;
  reserve_ticket(terms, shape, &needs);
  if (terms.routes.plans_steps() && shape.has_room_to_step) reserve_step(terms, shape, &needs);
  if (shape.is_speculative) reserve_guess(terms, shape, &needs);
  reserve_named(terms, shape, &needs);
  reserve_search(terms, shape, shape.most_tokens, &needs);
  for (size_t r = 0; r < kMostRoutes; ++r)
    if (taken.uses[r]) terms.key_routes[r]->reserve(terms, shape, taken, &needs);
  Reservation chunk;
  if (taken.prefill.n_tokens > 0) {
    reserve_long(terms, shape, taken.prefill, &chunk);
    reserve_search(terms, shape, taken.prefill.room_tokens, &chunk);
  }
  needs.include(chunk);
  needs.descriptor_bytes = power_of_two(needs.descriptor_bytes);
  return needs;
}

}  // namespace tandem
