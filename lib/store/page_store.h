// SPDX-License-Identifier: MIT
// The host store: K and V of every token, head-major, in pages with reference counts.
//
// A page is page_len token slots in every layer, KV head, K and V at once, so one page table serves a whole sequence.
// Pages are cut from extents of about 2,048 tokens, fewer where these would be more than a GiB:
//
//   extent:  layer 0: K head 0 [2048 rows] | K head 1 | ... | V head 0 | V head 1 | ...   layer 1: ...
//            (with the planes of scales behind their codes, where a type has them)
//            | hidden states [2048 rows], of layers that keep them
//
// With several NUMA nodes an extent has one part for each node. A part has the layout above, with that node's heads only
// (lib/machine/placement.h). A part begins on a huge page, or on a page where extents are too small for huge pages.
//
// An extent is pinned in pieces, each of which has consecutive layers of a part (lib/store/store_pins.h).
//
// Consecutive pages of an extent are contiguous for each head. So a sequence that grows alone is scanned linearly and copied
// in large pieces. An extent is allocated whole and never moves. Page p is slot range p % pages_per_extent of extent p /
// pages_per_extent. An extent whose memory was given back keeps its number, and its pages are not taken. Such extents get
// memory again before new ones are made.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lib/base/memory.h"
#include "lib/machine/device_owner.h"
#include "lib/store/row_cursor.h"
#include "lib/store/store_pins.h"
#include "lib/store/store_population.h"
#include "lib/tables/backend.h"

namespace tandem {

struct StoreGeometry {
  int64_t page_len = 0;
  int64_t pages_per_extent = 0;
  int64_t extent_bytes = 0;
  std::vector<LayerPlanes> layers;
  struct Part {
    int32_t node = 0;  // or kAllNodes
    int64_t offset = 0, bytes = 0;
  };
  std::vector<Part> parts;  // parts of an extent, contiguous
  struct Piece {
    int64_t offset = 0, bytes = 0;
  };
  std::vector<Piece> pieces;                   // pieces of an extent, contiguous, each pinned separately
  std::vector<std::vector<size_t>> pieces_of;  // [n_layers], ascending: the pieces that have rows of the layer
  int64_t token_bytes = 0;                     // K and V of one token in all layers
  int64_t x_token_bytes = 0;                   // hidden states of one token in all layers

  int64_t extent_len() const { return pages_per_extent * page_len; }  // tokens
};
StoreGeometry make_store_geometry(const std::vector<Layer>& layers, int64_t page_len, int32_t n_nodes);

// The engine's device and thread that pin memory.
struct Pinner {
  const Device& device;
  Worker& worker;
};

// How far a list of pages is pinned. n: pages from the first one that are all pinned. missing_ns: the time that pinning the
// rest will take. is_refused: the device has refused some.
struct PinnedPages {
  int64_t n = 0;
  double missing_ns = 0.0;
  bool is_refused = false;
};

class PageStore {
 public:
  PageStore(const std::vector<Layer>& layers, int64_t page_len, Tier& tier, const Backend& cpu);
  ~PageStore();
  PageStore(const PageStore&) = delete;

  const StoreGeometry& geometry() const { return geometry_; }
  int64_t page_len() const { return geometry_.page_len; }
  // Makes sure that n_pages pages can be taken. On failure nothing has changed.
  Status make_free(int64_t n_pages);
  // Takes a page and gives it one reference. Cannot fail after make_free(). Prefers the successor of `after` (-1: none). n:
  // the number of pages that the caller is about to take one after the other, this one included.
  int32_t take(int32_t after, int64_t n = 1);
  void retain(int32_t page) { ++references_[static_cast<size_t>(page)]; }
  void release(int32_t page);
  // Gives back the memory of extents whose pages are all unused. Returns the number of bytes.
  int64_t trim();
  bool shared(int32_t page) const { return references_[static_cast<size_t>(page)] > 1; }
  bool adjacent(int32_t a, int32_t b) const { return b == a + 1 && b % geometry_.pages_per_extent != 0; }
  // Copies the first n_tokens slots of a page in every layer.
  void copy_page(int32_t from, int32_t to, int64_t n_tokens);

  // positions: of the sequence that has these pages. extents: bases(), or a copy for readers that must not access the store
  // while it may grow.
  StoreView view(std::span<const int32_t> pages, std::span<const int32_t> positions,
                 std::span<std::byte* const> extents) const {
    return {geometry_.layers.data(), extents, pages, positions, geometry_.page_len, geometry_.pages_per_extent};
  }
  const std::vector<std::byte*>& bases() const { return bases_; }
  const LayerPlanes& planes(int32_t layer_idx) const { return geometry_.layers[static_cast<size_t>(layer_idx)]; }
  int64_t n_used() const { return n_used_; }
  int64_t n_shared() const;
  // Pins these pages' rows of a layer and waits for that. Returns false if the device refuses some.
  bool pin(std::span<const int32_t> pages, int32_t layer_idx, const Pinner& by);
  // Has the background thread pin these rows, and returns how far they are pinned now.
  PinnedPages pin_ahead(std::span<const int32_t> pages, int32_t layer_idx, const Pinner& by);
  // Has a background thread make the kernel commit the memory of the page's extent, unless that was asked for before.
  void populate(int32_t page, Worker& by);
  int64_t pinned_bytes() const { return pins_ != nullptr ? pins_->pinned_bytes() : 0; }

 private:
  struct Gap {  // consecutive free pages of an extent
    int32_t begin = -1;
    int32_t n_pages = 0;
  };

  Gap longest_gap();
  void add_extent(Buffer memory);
  void set_extent(size_t extent, int32_t references);
  StorePins& pins(const Pinner& by);
  template <typename Visit>
  void for_pieces(int32_t page, int32_t layer_idx, Visit visit) const;
  int32_t per_extent() const { return static_cast<int32_t>(geometry_.pages_per_extent); }

  StoreGeometry geometry_;
  Tier& tier_;
  Backend cpu_;
  std::vector<Buffer> extents_;          // empty if the memory was given back
  std::vector<std::byte*> bases_;        // first bytes of the extents; null if the memory was given back
  std::vector<int32_t> references_;      // [n_pages]; 1 if the extent has no memory
  std::vector<int32_t> used_of_extent_;  // pages taken; all pages if the extent has no memory
  int64_t n_gone_ = 0;                   // extents without memory
  size_t first_free_extent_ = 0;         // no earlier extent is wholly free
  int64_t n_used_ = 0;
  // Declared last, so these two are destroyed first. Null until memory is pinned or populated for the first time.
  std::unique_ptr<StorePins> pins_;
  std::unique_ptr<StorePopulation> population_;
};

}  // namespace tandem
