// SPDX-License-Identifier: MIT
#include "lib/page_store.h"

#include <algorithm>
#include <cstring>

#include "lib/dtype.h"

namespace tandem {
namespace {

constexpr int64_t kExtentTokens = 2048;
constexpr int64_t kSliceAlignment = 64;  // bytes, of one head's rows in an extent

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

StoreGeometry make_store_geometry(const std::vector<Layer>& layers, int64_t page_len) {
  StoreGeometry geometry;
  geometry.page_len = page_len;
  geometry.pages_per_extent = std::max<int64_t>(1, kExtentTokens / page_len);
  const int64_t tokens = geometry.pages_per_extent * page_len;
  int64_t offset = 0;
  for (const Layer& layer : layers) {
    const int64_t k_bytes = row_bytes(layer.k_type, layer.k_head_dim);
    const int64_t v_bytes = layer.v_aliases_k ? k_bytes : row_bytes(layer.v_type, layer.v_head_dim);
    geometry.k_row_bytes.push_back(k_bytes);
    geometry.v_row_bytes.push_back(v_bytes);
    geometry.layer_offset.push_back(offset);
    geometry.layer_v_offset.push_back(
        layer.v_aliases_k ? offset : offset + round_up(layer.n_kv_heads * tokens * k_bytes, kSliceAlignment));
    const int64_t stored = k_bytes + (layer.v_aliases_k ? 0 : v_bytes);
    offset += round_up(layer.n_kv_heads * tokens * k_bytes, kSliceAlignment);
    if (!layer.v_aliases_k) offset += round_up(layer.n_kv_heads * tokens * v_bytes, kSliceAlignment);
    geometry.token_bytes += layer.n_kv_heads * stored;
  }
  geometry.extent_bytes = offset;
  return geometry;
}

PageStore::PageStore(const std::vector<Layer>& layers, int64_t page_len, Tier& tier, const Backend& cpu)
    : layers_(layers), geometry_(make_store_geometry(layers, page_len)), tier_(tier), cpu_(cpu) {}

Status PageStore::make_free(int64_t n_pages) {
  const auto total = static_cast<int64_t>(references_.size());
  const int64_t missing = n_pages - (total - n_used_);
  if (missing <= 0) return {};
  const int64_t n_extents = (missing + geometry_.pages_per_extent - 1) / geometry_.pages_per_extent;
  const size_t before = extents_.size();
  extents_.reserve(before + static_cast<size_t>(n_extents));
  references_.reserve(static_cast<size_t>(total + n_extents * geometry_.pages_per_extent));
  std::vector<Buffer> made(static_cast<size_t>(n_extents));
  for (Buffer& extent : made) TANDEM_TRY(Buffer::create(tier_, geometry_.extent_bytes, Use::kKv, &extent));
  const int32_t n_nodes = cpu_.table->n_nodes(cpu_.self);
  const int64_t tokens = geometry_.pages_per_extent * geometry_.page_len;
  for (Buffer& extent : made) {
    // A KV head's rows live where its workers are; with one node there is nothing to place.
    for (size_t l = 0; n_nodes > 1 && l < layers_.size(); ++l) {
      for (int32_t h = 0; h < layers_[l].n_kv_heads; ++h) {
        const int64_t k_bytes = tokens * geometry_.k_row_bytes[l], v_bytes = tokens * geometry_.v_row_bytes[l];
        const int32_t node = h % n_nodes;
        cpu_.table->place(cpu_.self, extent.data() + geometry_.layer_offset[l] + h * k_bytes, k_bytes, node);
        if (!layers_[l].v_aliases_k)
          cpu_.table->place(cpu_.self, extent.data() + geometry_.layer_v_offset[l] + h * v_bytes, v_bytes, node);
      }
    }
    extents_.push_back(std::move(extent));
  }
  references_.resize(static_cast<size_t>(total + n_extents * geometry_.pages_per_extent), 0);
  return {};
}

int32_t PageStore::take(int32_t after) {
  const auto n = static_cast<int32_t>(references_.size());
  int32_t page = after + 1;
  if (after < 0 || page >= n || !adjacent(after, page) || references_[static_cast<size_t>(page)] != 0) {
    // Nothing to continue: the longest free gap, its start where it begins an extent or follows nobody who still grows,
    // else its middle, so that whoever sits before the gap can go on growing into it.
    int32_t best = -1, best_len = 0;
    for (int32_t i = 0; i < n;) {
      if (references_[static_cast<size_t>(i)] != 0) {
        ++i;
        continue;
      }
      const int32_t begin = i;
      const int32_t limit = static_cast<int32_t>((begin / geometry_.pages_per_extent + 1) * geometry_.pages_per_extent);
      while (i < limit && references_[static_cast<size_t>(i)] == 0) ++i;
      if (i - begin > best_len) best = begin, best_len = i - begin;
    }
    page = best % geometry_.pages_per_extent == 0 ? best : best + best_len / 2;
  }
  references_[static_cast<size_t>(page)] = 1;
  ++n_used_;
  return page;
}

void PageStore::release(int32_t page) {
  if (--references_[static_cast<size_t>(page)] == 0) --n_used_;
}

void PageStore::copy_page(int32_t from, int32_t to, int64_t n_tokens) {
  for (size_t l = 0; l < layers_.size(); ++l) {
    const auto layer_idx = static_cast<int32_t>(l);
    for (int32_t h = 0; h < layers_[l].n_kv_heads; ++h) {
      std::memcpy(k_row(to, 0, layer_idx, h), k_row(from, 0, layer_idx, h),
                  static_cast<size_t>(n_tokens * geometry_.k_row_bytes[l]));
      if (!layers_[l].v_aliases_k)
        std::memcpy(v_row(to, 0, layer_idx, h), v_row(from, 0, layer_idx, h),
                    static_cast<size_t>(n_tokens * geometry_.v_row_bytes[l]));
    }
  }
}

int64_t PageStore::n_shared() const {
  return std::count_if(references_.begin(), references_.end(), [](int32_t count) { return count > 1; });
}

}  // namespace tandem
