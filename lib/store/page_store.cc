// SPDX-License-Identifier: MIT
#include "lib/store/page_store.h"

#include <algorithm>
#include <cstring>

#include "lib/base/process_end.h"
#include "lib/machine/device_memory.h"
#include "lib/machine/placement.h"

namespace tandem {
namespace {

constexpr int64_t kExtentTokens = 2048;
constexpr int64_t kSliceAlignment = 64;  // bytes, of one head's rows in an extent

constexpr int64_t kLargePart = 16 * kHugePageBytes;  // rounded up to huge pages it grows by a sixteenth at most

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// For n elements in all; more than asked for, as reserve() alone would copy everything each time.
template <class T>
void make_room(std::vector<T>& list, size_t n) {
  if (n > list.capacity()) list.reserve(std::max(n, 2 * list.capacity()));
}

// The planes of a layer's heads on the part's node, behind what the part has. Planes of the layer are no head's.
void lay_out(int32_t n_nodes, int64_t tokens, LayerPlanes* layer, StoreGeometry::Part* part) {
  const int32_t n_heads = layer->heads().n;
  for (StoredPlane& plane : layer->planes) {
    for (int32_t i = 0; i < static_cast<int32_t>(plane.at.size()); ++i) {
      if (part->node != (plane.scope == Scope::kLayer ? kAllNodes : node_of_head(i, n_heads, n_nodes))) continue;
      plane.at[i] = part->offset + part->bytes;
      part->bytes += tokens * plane.row_bytes;
    }
    part->bytes = round_up(part->bytes, kSliceAlignment);
  }
}

StoreGeometry lay_out_extent(const std::vector<Layer>& layers, int64_t page_len, int64_t pages_per_extent, int32_t n_nodes) {
  StoreGeometry geometry;
  geometry.page_len = page_len;
  geometry.pages_per_extent = pages_per_extent;
  for (const Layer& layer : layers) {
    const LayerPlanes& planes = geometry.layers.emplace_back(layer);
    geometry.token_bytes += planes.token_bytes(Scope::kHead);
    geometry.x_token_bytes += planes.token_bytes(Scope::kLayer);
  }
  const int64_t tokens = geometry.pages_per_extent * page_len;
  int64_t unit = 1;  // of a part
  if (n_nodes > 1)
    unit = tokens * (geometry.token_bytes + geometry.x_token_bytes) < n_nodes * kLargePart ? kPageBytes : kHugePageBytes;
  for (int32_t node = kAllNodes; node < n_nodes; ++node) {
    StoreGeometry::Part part{node, geometry.extent_bytes, 0};
    for (LayerPlanes& layer : geometry.layers) lay_out(n_nodes, tokens, &layer, &part);
    part.bytes = round_up(part.bytes, unit);
    geometry.extent_bytes += part.bytes;
    if (part.bytes > 0) geometry.parts.push_back(part);
  }
  return geometry;
}

}  // namespace

// An extent is pinned whole, as a copy may not begin in one pinned piece and end in another: where it would be more than is
// pinned at a time it has fewer tokens, down to the shortest runs that are scanned and copied at full speed.
StoreGeometry make_store_geometry(const std::vector<Layer>& layers, int64_t page_len, int32_t n_nodes) {
  constexpr int64_t kLeastTokens = 128;
  int64_t n_pages = std::max<int64_t>(1, kExtentTokens / page_len);
  StoreGeometry geometry = lay_out_extent(layers, page_len, n_pages, n_nodes);
  while (geometry.extent_bytes > most_pinned_bytes && n_pages > 1 && n_pages * page_len > kLeastTokens)
    geometry = lay_out_extent(layers, page_len, n_pages /= 2, n_nodes);
  return geometry;
}

PageStore::PageStore(const std::vector<Layer>& layers, int64_t page_len, Tier& tier, const Backend& cpu)
    : geometry_(make_store_geometry(layers, page_len, n_nodes(cpu))), tier_(tier), cpu_(cpu) {}

PageStore::~PageStore() {
  for (size_t i = 0; i < pins_.size(); ++i)
    if (pins_[i] == Pin::kPinned && !process_ends()) pinned_by_->table->unpin(pinned_by_->self, extents_[i].data());
}

bool PageStore::pin(std::span<const int32_t> pages, const Device& device) {
  if (pins_.size() < extents_.size()) pins_.resize(extents_.size(), Pin::kNotAsked);
  pinned_by_ = &device;
  bool are_pinned = true;
  for (const int32_t page : pages) {
    const auto extent = static_cast<size_t>(page / per_extent());
    Pin& pin = pins_[extent];
    if (pin == Pin::kNotAsked) {
      DeviceError error;
      pin = owns_pages(tier_, extents_[extent]) && geometry_.extent_bytes <= most_pinned_bytes &&
                    device.table->pin(device.self, extents_[extent].data(), geometry_.extent_bytes, &error) == TANDEM_OK
                ? Pin::kPinned
                : Pin::kRefused;
      if (pin == Pin::kPinned) pinned_bytes_ += geometry_.extent_bytes;
    }
    are_pinned = are_pinned && pin == Pin::kPinned;
  }
  return are_pinned;
}

Status PageStore::make_free(int64_t n_pages) {
  const auto total = static_cast<int64_t>(references_.size());
  const int64_t missing = n_pages - (total - n_used_);
  if (missing <= 0) return {};
  const int64_t n_extents = (missing + geometry_.pages_per_extent - 1) / geometry_.pages_per_extent;
  const size_t before = extents_.size();
  make_room(extents_, before + static_cast<size_t>(n_extents));
  make_room(bases_, before + static_cast<size_t>(n_extents));
  make_room(used_of_extent_, before + static_cast<size_t>(n_extents));
  make_room(references_, static_cast<size_t>(total + n_extents * geometry_.pages_per_extent));
  std::vector<Buffer> made(static_cast<size_t>(n_extents));
  for (Buffer& extent : made) TANDEM_TRY(Buffer::create(tier_, geometry_.extent_bytes, Use::kKv, &extent));
  for (Buffer& extent : made) {
    for (const StoreGeometry::Part& part : geometry_.parts)
      place(cpu_, tier_, extent.data() + part.offset, part.bytes, part.node);
    bases_.push_back(extent.data());
    extents_.push_back(std::move(extent));
  }
  references_.resize(static_cast<size_t>(total + n_extents * geometry_.pages_per_extent), 0);
  used_of_extent_.resize(extents_.size(), 0);
  return {};
}

int32_t PageStore::take(int32_t after, int64_t n) {
  const auto n_pages = static_cast<int32_t>(references_.size());
  int32_t page = after + 1;
  if (after < 0 || page >= n_pages || !adjacent(after, page) || references_[static_cast<size_t>(page)] != 0) {
    // Nothing to continue: the longest free gap, its start where it begins an extent or follows nobody who still grows,
    // else its middle, so that whoever sits before the gap can go on growing into it. Several pages begin at multiples of
    // their number: sequences of one length lie side by side in the end, at one distance.
    const Gap gap = longest_gap();
    const auto together = static_cast<int32_t>(std::clamp<int64_t>(n, 1, gap.n_pages));
    page = gap.begin;
    if (gap.begin % per_extent() != 0) {
      page += gap.n_pages / 2;
      page -= page % per_extent() % together;
      page = std::max(gap.begin, std::min(page, gap.begin + gap.n_pages - together));
    }
  }
  references_[static_cast<size_t>(page)] = 1;
  ++used_of_extent_[static_cast<size_t>(page / per_extent())];
  ++n_used_;
  return page;
}

// The first of the longest ones. No gap is longer than an extent.
PageStore::Gap PageStore::longest_gap() {
  const auto n_extents = used_of_extent_.size();
  while (first_free_extent_ < n_extents && used_of_extent_[first_free_extent_] != 0) ++first_free_extent_;
  if (first_free_extent_ < n_extents) return {static_cast<int32_t>(first_free_extent_) * per_extent(), per_extent()};
  Gap best;
  for (size_t extent = 0; extent < n_extents; ++extent) {
    if (per_extent() - used_of_extent_[extent] <= best.n_pages) continue;
    const int32_t end = static_cast<int32_t>(extent + 1) * per_extent();
    int32_t begin = end - per_extent();
    for (int32_t i = begin; i <= end; ++i) {
      if (i < end && references_[static_cast<size_t>(i)] == 0) continue;
      if (i - begin > best.n_pages) best = {begin, i - begin};
      begin = i + 1;
    }
  }
  return best;
}

void PageStore::release(int32_t page) {
  if (--references_[static_cast<size_t>(page)] != 0) return;
  --n_used_;
  const auto extent = static_cast<size_t>(page / per_extent());
  if (--used_of_extent_[extent] == 0) first_free_extent_ = std::min(first_free_extent_, extent);
}

void PageStore::copy_page(int32_t from, int32_t to, int64_t n_tokens) {
  for (size_t l = 0; l < geometry_.layers.size(); ++l)
    copy_tokens(view({&from, 1}, {}, bases_), 0, view({&to, 1}, {}, bases_), 0, static_cast<int32_t>(l), n_tokens);
}

int64_t PageStore::n_shared() const {
  return std::count_if(references_.begin(), references_.end(), [](int32_t count) { return count > 1; });
}

}  // namespace tandem
