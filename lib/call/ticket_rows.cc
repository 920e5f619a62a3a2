// SPDX-License-Identifier: MIT
#include "lib/call/ticket_rows.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace tandem {
namespace {

constexpr int64_t kWorthSpreading = 65536;  // bytes

// The shares of a ticket's rows that workers copy: n_of_copy ranges of heads for each copy. The first share of a copy also
// has the planes of the layer.
struct RowShares {
  const std::vector<RowCopy>& rows;
  const LayerPlanes& planes;
  const HostSlot& slot;
  int64_t bytes = 0, n_of_copy = 1;

  RowShares(const std::vector<RowCopy>& of, const LayerPlanes& layer, const HostSlot& from)
      : rows(of), planes(layer), slot(from) {
    for (const RowCopy& copy : rows)
      bytes += copy.to.n * (planes.token_bytes(Scope::kHead) + planes.token_bytes(Scope::kLayer));
    n_of_copy = std::clamp<int64_t>(bytes / std::max<int64_t>(1, std::ssize(rows)) / kWorthSpreading, 1, planes.heads().n);
  }
  int64_t n() const { return n_of_copy * std::ssize(rows); }

  void take(int64_t idx) const {
    const auto& [to, in_slot] = rows[static_cast<size_t>(idx / n_of_copy)];
    const int64_t share = idx % n_of_copy, n_heads = planes.heads().n;
    for (int32_t p = 0; p < kStoredPlanes; ++p) {
      const StoredPlane& plane = planes.planes[p];
      const bool is_whole = plane.scope == Scope::kLayer;
      const std::byte* const from = slot.data + (is_whole ? slot.exchange.x_at : slot.exchange.rows_at[p]);
      const int64_t end = is_whole ? 1 : (share + 1) * n_heads / n_of_copy;
      for (int64_t h = is_whole ? share : share * n_heads / n_of_copy; h < end && plane.row_bytes > 0; ++h)
        std::memcpy(plane.row(to, h), from + (h * slot.exchange.n_rows + in_slot) * plane.row_bytes,
                    static_cast<size_t>(to.n * plane.row_bytes));
    }
  }
};

}  // namespace

NewRowsLayout::NewRowsLayout(const Layer& layer, int64_t n_tokens, int64_t begin) : end(begin) {
  const PlaneBytes row = plane_bytes(layer);
  for (int32_t p = 0; p < kPlanes; ++p) {
    at[p] = end;
    end += device_aligned(n_tokens * layer.n_kv_heads * row.of[p]);
  }
  x_at = end;
  end += device_aligned(n_tokens * layer.x_bytes());
}

void TicketRows::add(const StoreView& view, const SequenceCall& call) {
  constexpr int64_t kMostRows = 32;  // of a copy, as all rows of a ticket may be contiguous, and workers share the copies
  for (int64_t t = call.first_query; t < call.length; t += own_.back().to.n)
    own_.push_back({view.run_at(t, std::min(t + kMostRows, call.length)), call.first_row + t - call.first_query});
}

int64_t TicketRows::take(const Backend& cpu, const LayerPlanes& planes, const HostSlot& slot) const {
  RowShares shares(rows(), planes, slot);
  const auto take_share = [](void* all, int64_t idx, int32_t) { static_cast<const RowShares*>(all)->take(idx); };
  if (shares.bytes >= kWorthSpreading)
    cpu.table->run(cpu.self, shares.n(), take_share, &shares);
  else
    for (int64_t i = 0; i < shares.n(); ++i) shares.take(i);
  return shares.bytes;
}

}  // namespace tandem
