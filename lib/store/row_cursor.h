// SPDX-License-Identifier: MIT
// Stored rows: what a cache keeps of each token, where that lies, and the one walk over it.
//
// Each payload is a plane of its layer. A plane has a row per token for each KV head (K, V, their scales), or one row per
// token (hidden states). Code that moves rows asks for a set of planes, never for a payload by name.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/tables/planes.h"

namespace tandem {

struct TokenRange {
  int64_t begin = 0, end = 0;
};
struct HeadRange {  // consecutive KV heads
  int32_t first = 0, n = 0;
};

// Tokens [token, token + n). Their rows lie side by side in an extent, in every plane and head from row `row` on.
struct TokenRun {
  std::byte* extent = nullptr;
  int64_t row = 0, token = 0, n = 0;
};

enum class Scope : uint8_t { kHead, kLayer };

struct StoredPlane {
  const char* name = "";  // the same in every build: for files and messages
  Scope scope = Scope::kHead;
  bool on_device = false;      // also in windows; else on the host alone
  int64_t row_bytes = 0;       // 0: the layer has no such rows
  std::vector<int64_t> at;     // bytes from the begin of an extent to the first row: [n_kv_heads]; of scope kLayer: [1]
  std::vector<int64_t> piece;  // likewise, to the begin of what is pinned with these rows (lib/store/store_pins.h)

  std::byte* row(const TokenRun& run, int64_t head) const { return run.extent + at[head] + run.row * row_bytes; }
};

using PlaneSet = uint32_t;  // bit p: plane p
inline constexpr int32_t kPlaneHidden = kPlanes, kStoredPlanes = kPlanes + 1;
inline constexpr PlaneSet kAllPlanes = ~PlaneSet{0}, kHeadPlanes = (PlaneSet{1} << kPlanes) - 1,
                          kHiddenPlane = PlaneSet{1} << kPlaneHidden;

struct LayerPlanes {
  std::vector<StoredPlane> planes;  // the first are Plane's; other payloads follow: hidden states at kPlaneHidden

  explicit LayerPlanes(const Layer& layer);
  HeadRange heads() const { return {0, static_cast<int32_t>(planes[kPlaneK].at.size())}; }
  int64_t token_bytes(Scope scope) const;
  Rows rows(const TokenRun& run, int32_t kv_head) const;  // of K, V and their scales
};

// `positions` of a sequence's tokens; empty: token i has position i. Tokens that are not there yet count on from the last.
int64_t position_of(std::span<const int32_t> positions, int64_t token);
// How many of n tokens, one at least, have positions that follow each other.
int64_t consecutive(std::span<const int32_t> positions, int64_t first, int64_t n);

// Where one sequence's rows are. Plain data: while the sequence is in flight it can be read without the cache's mutex, if
// the owner has copies of what may grow. Extents never move.
struct StoreView {
  const LayerPlanes* layers = nullptr;     // [n_layers]
  std::span<std::byte* const> extents;     // their first bytes
  std::span<const int32_t> pages;          // page table
  std::span<const int32_t> positions;      // as position_of() has them
  int64_t page_len = 0, extent_pages = 0;  // tokens of a page, pages of an extent

  TokenRun run_at(int64_t token, int64_t end) const;  // as many tokens as possible
};

// Contiguous rows of one plane and head.
struct RowRun {
  int32_t plane = 0, head = 0;
  int64_t token = 0, n = 0;  // tokens
  std::byte* data = nullptr;
  int64_t bytes = 0;
  const std::byte* piece = nullptr;  // copies join within one alone, as memory is pinned piece by piece
};

enum class RowOrder : uint8_t {
  kByHead,  // head, plane, tokens; then the planes of the layer: to hash, compare and save
  kByRun,   // tokens, plane, head: to copy, as rows of several heads can be one copy
};

// Walks over the rows of some tokens of a layer. Allocates nothing.
class RowCursor {
 public:
  RowCursor(const StoreView& view, int32_t layer_idx, HeadRange heads, TokenRange tokens, PlaneSet planes, RowOrder order)
      : view_(view), layer_(view.layers[layer_idx]), heads_(heads), tokens_(tokens), planes_(planes), order_(order) {}
  // Runs end at multiples of n_tokens as well: where they go has pages of its own.
  void stop_at_multiples(int64_t n_tokens) { unit_ = n_tokens; }
  bool next(RowRun* run);  // false: there are no more

 private:
  bool next_lane();  // a lane: a plane of a head, or of the layer
  bool next_tokens();

  const StoreView view_;
  const LayerPlanes& layer_;
  const HeadRange heads_;
  const TokenRange tokens_;
  const PlaneSet planes_;
  const RowOrder order_;
  int64_t unit_ = INT64_MAX;
  int32_t plane_ = -1, head_ = heads_.first;
  TokenRun at_{nullptr, 0, tokens_.begin, 0};
};

// All that is stored of n tokens of a layer, from `first` on, to tokens `to_first` and so on; of either side within a page.
void copy_tokens(const StoreView& from, int64_t first, const StoreView& to, int64_t to_first, int32_t layer_idx, int64_t n);

}  // namespace tandem
