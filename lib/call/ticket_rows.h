// SPDX-License-Identifier: MIT
// The new rows of a ticket: copies from its slot to the store.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/call/sequence_call.h"
#include "lib/store/row_cursor.h"
#include "lib/tables/backend.h"

namespace tandem {

// Rows of a slot, from in_slot on, in every plane.
struct RowCopy {
  TokenRun to;
  int64_t in_slot = 0;
};

class TicketRows {
 public:
  void clear() { rows_.clear(); }
  // The new tokens of a call, which the slot has. view: of its sequence, whose pages are there.
  void add(const StoreView& view, const SequenceCall& call);
  bool any() const { return !rows_.empty(); }
  // On the pool, where there is enough to do. Returns how many bytes these are.
  int64_t take(const Backend& cpu, const LayerPlanes& planes, const HostSlot& slot) const;

 private:
  std::vector<RowCopy> rows_;
};

}  // namespace tandem
