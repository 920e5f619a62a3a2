// SPDX-License-Identifier: MIT
#include "lib/store/page_store.h"

#include <algorithm>
#include <cstring>

#include "lib/machine/device_memory.h"
#include "lib/machine/placement.h"

namespace tandem {
namespace {

constexpr int64_t kExtentTokens = 2048;
constexpr int64_t kSliceAlignment = 64;  // bytes; alignment of one head's rows in an extent

constexpr int64_t kLargePart = 16 * kHugePageBytes;  // rounding to huge pages makes such a part at most a sixteenth larger

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Makes room for n elements in all. Asks for more than n, as reserve() alone would copy all elements each time.
template <class T>
void make_room(std::vector<T>& list, size_t n) {
  if (n > list.capacity()) list.reserve(std::max(n, 2 * list.capacity()));
}

// Begins a new piece if `offset` is on a system page and the last piece is large enough. Pieces begin where layers begin.
void begin_piece(StoreGeometry* geometry, int64_t offset) {
  if (offset % kPageBytes != 0) return;
  if (geometry->pieces.empty() || offset - geometry->pieces.back().offset >= least_pinned_bytes)
    geometry->pieces.push_back({offset, 0});
}

// Sets the pieces' sizes and which pieces each layer has. Called once all layers are laid out.
void end_pieces(StoreGeometry* geometry) {
  std::vector<StoreGeometry::Piece>& pieces = geometry->pieces;
  for (size_t i = 0; i < pieces.size(); ++i)
    pieces[i].bytes = (i + 1 < pieces.size() ? pieces[i + 1].offset : geometry->extent_bytes) - pieces[i].offset;
  for (LayerPlanes& layer : geometry->layers) {
    std::vector<size_t>& of_layer = geometry->pieces_of.emplace_back();
    for (StoredPlane& plane : layer.planes) {
      for (size_t i = 0; i < plane.at.size() && plane.row_bytes > 0; ++i) {
        const auto behind =
            std::upper_bound(pieces.begin(), pieces.end(), plane.at[i],
                             [](int64_t at, const StoreGeometry::Piece& piece) { return at < piece.offset; });
        plane.piece[i] = (behind - 1)->offset;
        of_layer.push_back(static_cast<size_t>(behind - 1 - pieces.begin()));
      }
    }
    std::sort(of_layer.begin(), of_layer.end());
    of_layer.erase(std::unique(of_layer.begin(), of_layer.end()), of_layer.end());
  }
}

// Appends to the part the planes of those heads of a layer that are on the part's node. Planes of scope kLayer belong to no
// head and go to the part of all nodes.
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
  int64_t unit = 1;  // a part is rounded up to this
  if (n_nodes > 1)
    unit = tokens * (geometry.token_bytes + geometry.x_token_bytes) < n_nodes * kLargePart ? kPageBytes : kHugePageBytes;
  for (int32_t node = kAllNodes; node < n_nodes; ++node) {
    StoreGeometry::Part part{node, geometry.extent_bytes, 0};
    for (LayerPlanes& layer : geometry.layers) {
      begin_piece(&geometry, part.offset + part.bytes);
      lay_out(n_nodes, tokens, &layer, &part);
    }
    part.bytes = round_up(part.bytes, unit);
    geometry.extent_bytes += part.bytes;
    if (part.bytes > 0) geometry.parts.push_back(part);
  }
  end_pieces(&geometry);
  return geometry;
}

}  // namespace

// A copy must not begin in one pinned piece and end in another, and an extent may be one piece. If an extent would be larger
// than the most that is pinned at a time, it gets fewer tokens, down to the shortest runs that are scanned and copied at
// full speed.
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

PageStore::~PageStore() = default;

StorePins& PageStore::pins(const Pinner& by) {
  if (pins_ == nullptr) pins_ = std::make_unique<StorePins>(by.device, by.worker);
  pins_->grow(extents_.size() * geometry_.pieces.size());
  return *pins_;
}

// Calls visit(number of the piece, the piece) for the layer's pieces of the page's extent.
template <typename Visit>
void PageStore::for_pieces(int32_t page, int32_t layer_idx, Visit visit) const {
  const auto extent = static_cast<size_t>(page / per_extent());
  const Buffer& memory = extents_[extent];
  const bool may_be_pinned = owns_pages(tier_, memory) && geometry_.extent_bytes <= most_pinned_bytes;
  const size_t n_pieces = geometry_.pieces.size();
  for (const size_t i : geometry_.pieces_of[static_cast<size_t>(layer_idx)]) {
    const StoreGeometry::Piece& piece = geometry_.pieces[i];
    visit(extent * n_pieces + i, StorePins::Piece{memory.data() + piece.offset, piece.bytes, may_be_pinned});
  }
}

bool PageStore::pin(std::span<const int32_t> pages, int32_t layer_idx, const Pinner& by) {
  StorePins& pins = this->pins(by);
  bool are_pinned = true;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (i > 0 && pages[i] / per_extent() == pages[i - 1] / per_extent()) continue;
    for_pieces(pages[i], layer_idx,
               [&](size_t idx, const StorePins::Piece& piece) { are_pinned = pins.pin(idx, piece) && are_pinned; });
  }
  return are_pinned;
}

PinnedPages PageStore::pin_ahead(std::span<const int32_t> pages, int32_t layer_idx, const Pinner& by) {
  StorePins& pins = this->pins(by);
  PinnedPages found{std::ssize(pages)};
  int64_t missing_bytes = 0;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (i > 0 && pages[i] / per_extent() == pages[i - 1] / per_extent()) continue;
    for_pieces(pages[i], layer_idx, [&](size_t idx, const StorePins::Piece& piece) {
      const StorePins::State state = pins.ask(idx, piece);
      if (state == StorePins::State::kPinned) return;
      found.n = std::min(found.n, static_cast<int64_t>(i));
      found.is_refused = found.is_refused || state == StorePins::State::kRefused;
      missing_bytes += piece.bytes;
    });
  }
  if (missing_bytes > 0) found.missing_ns = pins.ns_of(missing_bytes);
  return found;
}

void PageStore::populate(int32_t page, Worker& by) {
  if (!tier_.maps()) return;
  if (population_ == nullptr) population_ = std::make_unique<StorePopulation>(by);
  const auto extent = static_cast<size_t>(page / per_extent());
  population_->grow(extents_.size());
  population_->ask(extent, extents_[extent].data(), geometry_.extent_bytes);
}

Status PageStore::make_free(int64_t n_pages) {
  const auto total = static_cast<int64_t>(references_.size());
  const int64_t missing = n_pages - (total - n_used_ - n_gone_ * geometry_.pages_per_extent);
  if (missing <= 0) return {};
  const int64_t n_extents = (missing + geometry_.pages_per_extent - 1) / geometry_.pages_per_extent;
  const auto n_more = static_cast<size_t>(n_extents - std::min(n_extents, n_gone_));
  make_room(extents_, extents_.size() + n_more);
  make_room(bases_, extents_.size() + n_more);
  make_room(used_of_extent_, extents_.size() + n_more);
  make_room(references_, references_.size() + n_more * static_cast<size_t>(per_extent()));
  std::vector<Buffer> made(static_cast<size_t>(n_extents));
  for (Buffer& extent : made) TANDEM_TRY(Buffer::create(tier_, geometry_.extent_bytes, Use::kKv, &extent));
  for (Buffer& extent : made) {
    for (const StoreGeometry::Part& part : geometry_.parts)
      place(cpu_, tier_, extent.data() + part.offset, part.bytes, part.node);
    add_extent(std::move(extent));
  }
  return {};
}

// Adds an extent in place of the first one whose memory was given back, else at the end, where the lists have room.
void PageStore::add_extent(Buffer memory) {
  const auto gone = std::find(bases_.begin(), bases_.end(), nullptr);
  const auto i = static_cast<size_t>(gone - bases_.begin());
  if (gone == bases_.end()) {
    bases_.push_back(memory.data());
    extents_.push_back(std::move(memory));
    used_of_extent_.push_back(0);
    references_.resize(references_.size() + static_cast<size_t>(per_extent()), 0);
    return;
  }
  *gone = memory.data();
  extents_[i] = std::move(memory);
  set_extent(i, 0);
  --n_gone_;
  first_free_extent_ = std::min(first_free_extent_, i);
}

// Sets the references of an extent without used pages: 0, or 1 so that its pages are not taken.
void PageStore::set_extent(size_t extent, int32_t references) {
  used_of_extent_[extent] = references * per_extent();
  std::fill_n(references_.begin() + static_cast<std::ptrdiff_t>(extent) * per_extent(), per_extent(), references);
}

int64_t PageStore::trim() {
  const size_t n_pieces = geometry_.pieces.size();
  int64_t n_given = 0;
  for (size_t i = 0; i < extents_.size(); ++i) {
    if (used_of_extent_[i] != 0) continue;
    for (size_t piece = 0; pins_ != nullptr && piece < n_pieces; ++piece) pins_->forget(i * n_pieces + piece);
    if (population_ != nullptr) population_->forget(i, bases_[i], geometry_.extent_bytes);
    extents_[i] = Buffer();
    bases_[i] = nullptr;
    set_extent(i, 1);
    ++n_given;
  }
  n_gone_ += n_given;
  return n_given * geometry_.extent_bytes;
}

int32_t PageStore::take(int32_t after, int64_t n) {
  const auto n_pages = static_cast<int32_t>(references_.size());
  int32_t page = after + 1;
  if (after < 0 || page >= n_pages || !adjacent(after, page) || references_[static_cast<size_t>(page)] != 0) {
    // There is no page to continue, so take one from the longest free gap. Its first page is taken if the gap begins an
    // extent. Otherwise its middle, so that the sequence before the gap can grow into it. Pages that are taken together
    // begin at multiples of their number, so sequences of one length end up side by side at equal distances.
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

// Returns the first of the longest gaps. A gap never crosses extents.
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
