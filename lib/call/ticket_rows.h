// SPDX-License-Identifier: MIT
// The new rows of a call: where they lie in a slot, or in a buffer of a long chunk; and copies from a ticket's slot to the
// store.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/call/sequence_call.h"
#include "lib/store/row_cursor.h"
#include "lib/tables/backend.h"

namespace tandem {

// New rows of n_tokens, from byte `begin` on: of each plane [n_kv_heads][n_tokens], then hidden states.
struct NewRowsLayout {
  int64_t at[kPlanes] = {}, x_at = 0, end = 0;

  NewRowsLayout(const Layer& layer, int64_t n_tokens, int64_t begin = 0);
};

// Rows of a slot, from in_slot on, in every plane.
struct RowCopy {
  TokenRun to;
  int64_t in_slot = 0;
};

class TicketRows {
 public:
  void clear() {
    shared_ = nullptr;
    own_.clear();
  }
  // The new tokens of a call, which the slot has. view: of its sequence, whose pages are there.
  void add(const StoreView& view, const SequenceCall& call);
  // The rows are those of another ticket, which that one leaves in *rows, by give(), before either is posted.
  void share(const TicketRows* rows) { shared_ = rows; }
  void give(TicketRows* to) {
    to->own_.swap(own_);
    shared_ = to;
  }
  bool any() const { return !rows().empty(); }
  // On the pool, where there is enough to do. Returns how many bytes these are.
  int64_t take(const Backend& cpu, const LayerPlanes& planes, const HostSlot& slot) const;

 private:
  const std::vector<RowCopy>& rows() const { return shared_ != nullptr ? shared_->own_ : own_; }

  std::vector<RowCopy> own_;
  const TicketRows* shared_ = nullptr;
};

}  // namespace tandem
