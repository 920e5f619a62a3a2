// SPDX-License-Identifier: MIT
#include "lib/pieces/device_window.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "lib/pieces/search_layout.h"

namespace tandem {

int64_t PagePlanes::lay_out(const Layer& layer, int64_t n_heads, int64_t page_len, int64_t begin, int64_t unit) {
  row_bytes = plane_bytes(layer);
  for (int32_t p = 0; p < kPlanes; ++p) {
    at[p] = begin;
    head_stride[p] = page_len * row_bytes.of[p];
    begin += (n_heads * head_stride[p] + unit - 1) / unit * unit;
  }
  return begin;
}

DevicePages PagePlanes::pages(std::byte* first, int32_t page_len) const {
  DevicePages pages;
  pages.page_len = page_len;
  for (int32_t p = 0; p < kPlanes; ++p) {
    pages.head_stride[p] = head_stride[p];
    if (row_bytes.of[p] > 0) pages.planes[p] = first + at[p];
  }
  return pages;
}

namespace {

// Appends bounds to the page, and the layer's lists to those of earlier layers.
void lay_out_pruned(const Layer& layer, const PruningOfLayer& pruning, int64_t n_lists, WindowGeometry* geometry) {
  WindowGeometry::LayerPlanes& planes = geometry->layers.back();
  for (const int64_t chunk_len : bounded_lengths(pruning)) {
    const int64_t n_rows = std::max<int64_t>(1, kDevicePageLen / chunk_len);
    const int64_t head_stride = n_rows * 4 * layer.k_head_dim;
    planes.bounds.push_back({chunk_len, geometry->page_bytes, head_stride});
    geometry->page_bytes += device_aligned(layer.n_kv_heads * head_stride);
  }
  DeviceSearch search;
  planes.kept_at = geometry->kept_bytes;
  geometry->kept_bytes += device_aligned(describe_record(pruning.decode, bounded_lengths(pruning), n_lists, &search));
}

}  // namespace

WindowGeometry make_window_geometry(const std::vector<Layer>& layers, const LayerPolicies& policies,
                                    const Pruning& pruning) {
  WindowGeometry geometry;
  for (size_t l = 0; l < layers.size(); ++l) {
    const Layer& layer = layers[l];
    WindowGeometry::LayerPlanes& planes = geometry.layers.emplace_back();
    geometry.page_bytes =
        planes.lay_out(window_layer(layer), layer.n_kv_heads, kDevicePageLen, geometry.page_bytes, kDeviceAlignment);
    if (policies[l].keeps_maw) {
      planes.maw_at = geometry.page_bytes;
      geometry.page_bytes += int64_t{4} * layer.n_q_heads * kDevicePageLen;  // a multiple of the alignment
    }
    if (policies[l].prunes) lay_out_pruned(layer, pruning.layers[l], n_key_lists(layer, pruning), &geometry);
    planes.bytes = geometry.page_bytes - planes.at[0];
  }
  return geometry;
}

// A window of n tokens may begin with the last slot of a page.
int64_t ring_pages(const PolicyOptions& options, int64_t cache_page_len, int64_t q_len) {
  const int64_t n = options.window_len + evict_len(options.window_len, cache_page_len) - 1 + q_len;
  return (n + kDevicePageLen - 2) / kDevicePageLen + 1;
}

int64_t DeviceWindow::any_page() const {
  return *std::find_if(table_.begin(), table_.end(), [](int64_t page) { return page != 0; });
}

bool DeviceWindow::begins_allocation(int64_t page) const {
  return std::any_of(pages_.begin(), pages_.end(), [page](const Buffer& of) {
    return reinterpret_cast<uintptr_t>(of.data()) == static_cast<uintptr_t>(page);
  });
}

// Visits the places that the newest tokens of [0, length) need.
template <typename Visit>
static void for_places(int64_t n_places, int64_t length, Visit visit) {
  const int64_t n = filled_pages(n_places, length), end = (length + kDevicePageLen - 1) / kDevicePageLen;
  int64_t place = (end - n) % n_places;
  for (int64_t i = 0; i < n; ++i, place = place + 1 < n_places ? place + 1 : 0) visit(static_cast<size_t>(place));
}

bool DeviceWindow::has_pages(int64_t length) const {
  bool has_all = true;
  for_places(n_pages(), length, [&](size_t place) { has_all = has_all && table_[place] != 0; });
  return has_all;
}

// Fills the table of a longer ring. Pages with the newest tokens of [0, end) keep them. Other pages go to *others.
void DeviceWindow::move_pages(std::vector<int64_t>* table, std::vector<int64_t>* others, int64_t end) const {
  std::vector<bool> is_kept(table_.size(), false);
  const int64_t n_old = n_pages(), last = end > 0 ? (end - 1) / kDevicePageLen : -1;
  for (int64_t page_idx = std::max<int64_t>(0, last - n_old + 1); page_idx <= last && n_old > 0; ++page_idx) {
    const auto from = static_cast<size_t>(page_idx % n_old);
    (*table)[static_cast<size_t>(page_idx % std::ssize(*table))] = table_[from];
    is_kept[from] = true;
  }
  for (size_t i = 0; i < table_.size(); ++i)
    if (!is_kept[i] && table_[i] != 0) others->push_back(table_[i]);
}

Status DeviceWindow::reserve(Tier& device_tier, const WindowGeometry& geometry, int64_t n_places, int64_t end,
                             int64_t length) {
  const int64_t n_old = n_pages();
  n_places = std::max(n_places, n_old);
  if (n_places == n_old && has_pages(length)) return {};
  std::vector<int64_t> table(static_cast<size_t>(n_places), 0), others;
  if (n_places == n_old)
    table = table_;
  else
    move_pages(&table, &others, end);
  int64_t n_missing = 0;
  for_places(n_places, length, [&](size_t place) { n_missing += table[place] == 0 ? 1 : 0; });
  const int64_t n_made = std::max<int64_t>(0, n_missing - std::ssize(others));
  Buffer made;
  pages_.reserve(pages_.size() + 1);
  valid_.resize(geometry.layers.size());
  maw_begin_.resize(geometry.layers.size(), kNoMaw);
  is_used_.resize(geometry.layers.size(), 0);
  kept_.resize(geometry.layers.size());
  if (n_made > 0) TANDEM_TRY(Buffer::create(device_tier, n_made * geometry.page_bytes, Use::kKv, &made));
  const auto first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(made.data()));
  for (int64_t i = n_made; i-- > 0;) others.push_back(first + i * geometry.page_bytes);  // pages are taken from the end
  const auto take = [&](int64_t* page) {
    if (*page != 0 || others.empty()) return;
    *page = others.back();
    others.pop_back();
  };
  for_places(n_places, length, [&](size_t place) { take(&table[place]); });
  for (int64_t& page : table) take(&page);  // remaining pages
  if (n_places > n_old) {
    const int64_t last = end > 0 ? (end - 1) / kDevicePageLen : -1;
    const int64_t first_kept = (last - n_old + 1) * kDevicePageLen;
    for (size_t l = 0; l < valid_.size(); ++l) {  // a layer that lags behind may have kept older tokens
      TokenRange& valid = valid_[l];
      if (valid.begin < first_kept) kept_[l].bounded = 0;
      valid.begin = std::max(valid.begin, first_kept);
      if (valid.begin >= valid.end) valid = {};
    }
  }
  if (n_made > 0) pages_.push_back(std::move(made));
  table_.swap(table);
  return {};
}

void DeviceWindow::extend(size_t layer_idx, int64_t begin, int64_t end) {
  if (begin >= end) return;
  TokenRange& valid = valid_[layer_idx];
  const bool joins = begin <= valid.end && end >= valid.begin && valid.begin < valid.end;
  valid = joins ? TokenRange{std::min(begin, valid.begin), std::max(end, valid.end)} : TokenRange{begin, end};
  make_way(layer_idx, valid.end);
}

// A new page replaces an older one as a whole.
void DeviceWindow::make_way(size_t layer_idx, int64_t end) {
  TokenRange& valid = valid_[layer_idx];
  const int64_t oldest_page = (end - 1) / kDevicePageLen - n_pages() + 1;
  valid.begin = std::max(valid.begin, oldest_page * kDevicePageLen);
  if (valid.begin >= valid.end) valid = {};
}

void DeviceWindow::make_way_for_older(size_t layer_idx, int64_t begin) {
  cut(layer_idx, (begin / kDevicePageLen + n_pages()) * kDevicePageLen);
}

void DeviceWindow::cut(int64_t end) {
  for (size_t l = 0; l < valid_.size(); ++l) cut(l, end);
}

void DeviceWindow::cut(size_t layer_idx, int64_t end) {
  if (valid_.empty()) return;
  // A step that was rolled back may not have bounded the chunk that ends at its own token.
  kept_[layer_idx].bounded = std::min(kept_[layer_idx].bounded, std::max<int64_t>(0, end - 1));
  TokenRange& valid = valid_[layer_idx];
  valid.end = std::min(valid.end, end);
  if (valid.end <= valid.begin) valid = {};
}

}  // namespace tandem
