// SPDX-License-Identifier: MIT
#include "lib/pieces/device_window.h"

#include <algorithm>

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

WindowGeometry make_window_geometry(const std::vector<Layer>& layers, const LayerPolicies& policies) {
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
    planes.bytes = geometry.page_bytes - planes.at[0];
  }
  return geometry;
}

// A window of n tokens may begin with the last slot of a page.
int64_t ring_pages(const PolicyOptions& options, int64_t cache_page_len, int64_t q_len) {
  const int64_t n = options.window_len + evict_len(options.window_len, cache_page_len) - 1 + q_len;
  return (n + kDevicePageLen - 2) / kDevicePageLen + 1;
}

Status DeviceWindow::reserve(Tier& device_tier, const WindowGeometry& geometry, int64_t n_pages, int64_t end) {
  const int64_t n_old = this->n_pages();
  if (n_pages <= n_old) return {};
  Buffer made;
  std::vector<int64_t> table(static_cast<size_t>(n_pages), 0);
  pages_.reserve(pages_.size() + 1);
  valid_.resize(geometry.layers.size());
  maw_begin_.resize(geometry.layers.size(), kNoMaw);
  TANDEM_TRY(Buffer::create(device_tier, (n_pages - n_old) * geometry.page_bytes, Use::kKv, &made));
  // The last pages keep their tokens; the others, new ones among them, fill the places between.
  std::vector<bool> is_kept(static_cast<size_t>(n_old), false);
  const int64_t last = end > 0 ? (end - 1) / kDevicePageLen : -1;
  for (int64_t page_idx = std::max<int64_t>(0, last - n_old + 1); page_idx <= last && n_old > 0; ++page_idx) {
    table[static_cast<size_t>(page_idx % n_pages)] = table_[static_cast<size_t>(page_idx % n_old)];
    is_kept[static_cast<size_t>(page_idx % n_old)] = true;
  }
  for (TokenRange& valid : valid_) {  // a layer that is behind may have kept older ones
    valid.begin = std::max(valid.begin, (last - n_old + 1) * kDevicePageLen);
    if (valid.begin >= valid.end) valid = {};
  }
  std::vector<int64_t> others;
  for (int64_t i = 0; i < n_old; ++i)
    if (!is_kept[static_cast<size_t>(i)]) others.push_back(table_[static_cast<size_t>(i)]);
  const auto first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(made.data()));
  for (int64_t i = 0; i < n_pages - n_old; ++i) others.push_back(first + i * geometry.page_bytes);
  auto next = others.begin();
  for (int64_t& page : table)
    if (page == 0) page = *next++;
  pages_.push_back(std::move(made));
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

// A page takes the place of an older one as a whole.
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
  TokenRange& valid = valid_[layer_idx];
  valid.end = std::min(valid.end, end);
  if (valid.end <= valid.begin) valid = {};
}

}  // namespace tandem
