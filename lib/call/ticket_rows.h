// SPDX-License-Identifier: MIT
// The new rows of a call: where they are in a slot or in the buffer of a long chunk, and the copies from a slot to the
// store.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/call/sequence_call.h"
#include "lib/store/row_cursor.h"
#include "lib/tables/backend.h"

namespace tandem {

// Byte offsets of n_tokens new rows, starting at `begin`: each plane [n_kv_heads][n_tokens], then hidden states.
struct NewRowsLayout {
  int64_t at[kPlanes] = {}, x_at = 0, end = 0;

  NewRowsLayout(const Layer& layer, int64_t n_tokens, int64_t begin = 0);
};

// Rows of a slot, from in_slot on, in every plane, and where they go.
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
  // Adds the call's new tokens, which are in the slot. view: of the sequence, which has their pages.
  void add(const StoreView& view, const SequenceCall& call);
  // share(rows): this ticket copies the rows of another ticket, which passes them on with give(rows) before either is
  // posted.
  void share(const TicketRows* rows) { shared_ = rows; }
  void give(TicketRows* to) {
    to->own_.swap(own_);
    shared_ = to;
  }
  bool any() const { return !rows().empty(); }
  // Copies the rows to the store, on the pool where there are enough of them. Returns the number of bytes.
  int64_t take(const Backend& cpu, const LayerPlanes& planes, const HostSlot& slot) const;

 private:
  const std::vector<RowCopy>& rows() const { return shared_ != nullptr ? shared_->own_ : own_; }

  std::vector<RowCopy> own_;
  const TicketRows* shared_ = nullptr;
};

}  // namespace tandem
