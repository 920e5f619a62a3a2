// SPDX-License-Identifier: MIT
#include "lib/call/reserve.h"

#include <algorithm>
#include <bit>

namespace tandem {

int64_t workspace_bytes(const Device& device, const Layer& layer, int64_t n_sequences, int64_t q_len) {
  DeviceAttend call;
  call.layer = &layer;
  call.pages.page_len = kDevicePageLen;
  call.sequences.n_sequences = static_cast<int32_t>(n_sequences);
  call.sequences.max_q_len = static_cast<int32_t>(q_len);
  return device.table->workspace_bytes(device.self, &call);
}

int64_t power_of_two(int64_t n) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))); }

void Reservation::add_descriptors(int64_t n_sequences, int64_t n_table_entries) {
  descriptor_bytes +=
      n_sequences * static_cast<int64_t>(sizeof(DeviceSequence)) + n_table_entries * static_cast<int64_t>(sizeof(int64_t));
}

void Reservation::add_lists(int64_t n) { descriptor_bytes += n * static_cast<int64_t>(sizeof(DeviceKeys)); }

void Reservation::include(const Reservation& other) {
  using R = Reservation;
  for (int64_t R::*const count :
       {&R::window_pages, &R::slot_rows, &R::n_evicted, &R::descriptor_bytes, &R::step_sequences, &R::step_lists,
        &R::step_pages, &R::slot_idx, &R::sent_idx, &R::n_lists, &R::n_granules, &R::step_named, &R::step_granules,
        &R::block_list_bytes, &R::search_bytes, &R::has_part_states, &R::prefill_bytes, &R::workspace_bytes})
    this->*count = std::max(this->*count, other.*count);
}

bool Reservation::has_room(const Reservation& call) const {
  Reservation all = *this;
  all.include(call);
  all.window_pages = window_pages;
  return all == *this;
}

}  // namespace tandem
