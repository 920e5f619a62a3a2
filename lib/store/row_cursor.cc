// SPDX-License-Identifier: MIT
#include "lib/store/row_cursor.h"

#include <algorithm>
#include <bit>
#include <iterator>

namespace tandem {

LayerPlanes::LayerPlanes(const Layer& layer) {
  constexpr const char* kNames[kStoredPlanes] = {"k", "k_scales", "v", "v_scales", "hidden"};
  const PlaneBytes bytes = plane_bytes(layer);
  const std::vector<int64_t> heads(static_cast<size_t>(layer.n_kv_heads));
  for (int32_t p = 0; p < kPlanes; ++p) planes.push_back({kNames[p], Scope::kHead, true, bytes.of[p], heads, heads});
  planes.push_back({kNames[kPlaneHidden], Scope::kLayer, false, layer.x_bytes(), {0}, {0}});
}

int64_t LayerPlanes::token_bytes(Scope scope) const {
  int64_t bytes = 0;
  for (const StoredPlane& plane : planes)
    if (plane.scope == scope) bytes += std::ssize(plane.at) * plane.row_bytes;
  return bytes;
}

Rows LayerPlanes::rows(const TokenRun& run, int32_t kv_head) const {
  Rows rows;
  for (int32_t p = 0; p < kPlanes; ++p)
    if (planes[p].row_bytes > 0) rows.of[p] = planes[p].row(run, kv_head);
  return rows;
}

int64_t position_of(std::span<const int32_t> positions, int64_t token) {
  if (positions.empty()) return token;
  const int64_t n = std::ssize(positions);
  return token < n ? positions[token] : int64_t{positions.back()} + 1 + token - n;
}

int64_t consecutive(std::span<const int32_t> positions, int64_t first, int64_t n) {
  if (positions.empty() || n <= 1) return n;
  const int64_t ahead = position_of(positions, first) - first;  // never less for a later token
  int64_t found = 1;
  for (int64_t end = n; found < end;) {
    const int64_t middle = found + (end - found + 1) / 2, last = first + middle - 1;
    if (position_of(positions, last) - last == ahead)
      found = middle;
    else
      end = middle - 1;
  }
  return found;
}

// A list of small chunks calls this thousands of times in each attend, and divisions would take most of the time. So there
// is only one division, of 32 bits. Most runs end in the page in which they begin.
TokenRun StoreView::run_at(int64_t token, int64_t end) const {
  const int page_shift = std::countr_zero(static_cast<uint64_t>(page_len));  // page_len is a power of two
  const int64_t first = token >> page_shift, slot = token & (page_len - 1);
  const auto page = static_cast<uint32_t>(pages[first]), of_extent = static_cast<uint32_t>(extent_pages);
  const uint32_t extent = page / of_extent;
  const int64_t in_extent = page - extent * of_extent;
  const TokenRun in_page{extents[extent], in_extent * page_len + slot, token, std::min(page_len - slot, end - token)};
  if (token + in_page.n == end) return in_page;
  const int64_t most = std::min(extent_pages - in_extent, ((end - 1) >> page_shift) - first + 1);
  int64_t n_pages = 1;
  while (n_pages < most && pages[first + n_pages] == pages[first] + n_pages) ++n_pages;
  return {in_page.extent, in_page.row, token, std::min(n_pages * page_len - slot, end - token)};
}

bool RowCursor::next_lane() {
  const auto n_planes = static_cast<int32_t>(layer_.planes.size());
  const int32_t heads_end = heads_.first + heads_.n;
  const auto scope = [&] { return layer_.planes[plane_].scope; };
  const auto has_rows = [&] {
    return (planes_ >> plane_ & 1) != 0 && layer_.planes[plane_].row_bytes > 0 && (heads_.n > 0 || scope() == Scope::kLayer);
  };
  if (order_ == RowOrder::kByRun) {
    if (plane_ >= 0 && scope() == Scope::kHead && ++head_ < heads_end) return true;
    head_ = heads_.first;
    while (++plane_ < n_planes)
      if (has_rows()) return true;
    return false;
  }
  for (;; ++head_, plane_ = -1) {  // planes of scope kLayer come last, as those of one more head
    while (++plane_ < n_planes)
      if (has_rows() && (scope() == Scope::kLayer) == (head_ == heads_end)) return true;
    if (head_ == heads_end) return false;
  }
}

bool RowCursor::next_tokens() {
  const int64_t token = at_.token + at_.n;
  if (token >= tokens_.end) return false;
  at_ = view_.run_at(token, std::min(tokens_.end - token, unit_ - token % unit_) + token);
  return true;
}

bool RowCursor::next(RowRun* run) {
  if (order_ == RowOrder::kByRun) {
    for (; at_.n == 0 || !next_lane(); plane_ = -1)
      if (!next_tokens()) return false;
  } else {
    for (; plane_ < 0 || !next_tokens(); at_ = {nullptr, 0, tokens_.begin, 0})
      if (!next_lane()) return false;
  }
  const StoredPlane& plane = layer_.planes[plane_];
  const int32_t head = plane.scope == Scope::kHead ? head_ : 0;
  *run = {plane_, head, at_.token, at_.n, plane.row(at_, head), at_.n * plane.row_bytes, at_.extent + plane.piece[head]};
  return true;
}

void copy_tokens(const StoreView& from, int64_t first, const StoreView& to, int64_t to_first, int32_t layer_idx, int64_t n) {
  const HeadRange heads = from.layers[layer_idx].heads();
  RowCursor rows(from, layer_idx, heads, {first, first + n}, kAllPlanes, RowOrder::kByRun);
  RowCursor targets(to, layer_idx, heads, {to_first, to_first + n}, kAllPlanes, RowOrder::kByRun);
  for (RowRun row, target; rows.next(&row) && targets.next(&target);)
    std::memcpy(target.data, row.data, static_cast<size_t>(row.bytes));
}

}  // namespace tandem
