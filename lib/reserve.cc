// SPDX-License-Identifier: MIT
#include "lib/reserve.h"

#include <algorithm>
#include <bit>

#include "lib/routes/routes_taken.h"

namespace tandem {

int64_t power_of_two(int64_t n) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))); }

void Reservation::add_descriptors(int64_t n_sequences, int64_t n_table_entries) {
  descriptor_bytes +=
      n_sequences * static_cast<int64_t>(sizeof(DeviceSequence)) + n_table_entries * static_cast<int64_t>(sizeof(int64_t));
}

void Reservation::include(const Reservation& other) {
  using R = Reservation;
  for (int64_t R::*const count :
       {&R::window_pages, &R::slot_rows, &R::n_evicted, &R::descriptor_bytes, &R::step_sequences, &R::step_described,
        &R::step_pages, &R::has_part_states, &R::prefill_bytes, &R::workspace_bytes})
    this->*count = std::max(this->*count, other.*count);
}

Reservation reserve_call(const SizeTerms& terms, const CallShape& shape, const RoutesTaken& taken) {
  Reservation needs;
  reserve_ticket(terms, shape, &needs);
  if (terms.routes.plans_steps() && shape.has_room_to_step) reserve_step(terms, shape, &needs);
  if (shape.is_speculative) reserve_guess(terms, shape, &needs);
  if (taken.streams && terms.routes.streams_keys()) reserve_stream(terms, shape, taken.layout, &needs);
  if (taken.rebuilds) reserve_rebuilt(terms, shape, &needs);
  Reservation chunk;
  if (taken.prefill.n_tokens > 0) reserve_long(terms, shape, taken.prefill, &chunk);
  needs.include(chunk);
  needs.descriptor_bytes = power_of_two(needs.descriptor_bytes);
  return needs;
}

}  // namespace tandem
