// SPDX-License-Identifier: MIT
// Stored rows: what a cache keeps of each token, where these rows lie, and the cursor that walks over them.
//
// Each kind of row is a plane of its layer. A plane has a row for each token and KV head (K, V, their scales), or one row
// for each token (hidden states). Code that moves rows asks for a set of planes, never for a kind of row by name.
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

// Tokens [token, token + n). Their rows are contiguous in an extent, in every plane and head, beginning at row `row`.
struct TokenRun {
  std::byte* extent = nullptr;
  int64_t row = 0, token = 0, n = 0;
};

enum class Scope : uint8_t { kHead, kLayer };

struct StoredPlane {
  const char* name = "";  // the same in every build, for files and messages
  Scope scope = Scope::kHead;
  bool on_device = false;      // also in windows; else only on the host
  int64_t row_bytes = 0;       // 0: the layer has no such plane
  std::vector<int64_t> at;     // bytes from an extent's begin to the first row: [n_kv_heads], or [1] for kLayer
  std::vector<int64_t> piece;  // the same, to the begin of the pinned piece with these rows (lib/store/store_pins.h)

  std::byte* row(const TokenRun& run, int64_t head) const { return run.extent + at[head] + run.row * row_bytes; }
};

using PlaneSet = uint32_t;  // bit p: plane p
inline constexpr int32_t kPlaneHidden = kPlanes, kStoredPlanes = kPlanes + 1;
inline constexpr PlaneSet kAllPlanes = ~PlaneSet{0}, kHeadPlanes = (PlaneSet{1} << kPlanes) - 1,
                          kHiddenPlane = PlaneSet{1} << kPlaneHidden;

struct LayerPlanes {
  std::vector<StoredPlane> planes;  // the planes of enum Plane first, then others: hidden states at kPlaneHidden

  explicit LayerPlanes(const Layer& layer);
  HeadRange heads() const { return {0, static_cast<int32_t>(planes[kPlaneK].at.size())}; }
  int64_t token_bytes(Scope scope) const;
  Rows rows(const TokenRun& run, int32_t kv_head) const;  // rows of K, V and their scales
};

// Returns a token's position. `positions`: those of a sequence's tokens; empty: token i has position i. Tokens behind the
// last known one continue from its position.
int64_t position_of(std::span<const int32_t> positions, int64_t token);
// Returns how many of n tokens, at least one, have consecutive positions.
int64_t consecutive(std::span<const int32_t> positions, int64_t first, int64_t n);

// Where one sequence's rows lie. Plain data: while the sequence is in flight, the owner may read it without the cache's
// mutex if it has copies of the parts that may grow. Extents never move.
struct StoreView {
  const LayerPlanes* layers = nullptr;     // [n_layers]
  std::span<std::byte* const> extents;     // first byte of each extent
  std::span<const int32_t> pages;          // page table
  std::span<const int32_t> positions;      // as in position_of()
  int64_t page_len = 0, extent_pages = 0;  // tokens of a page, pages of an extent

  TokenRun run_at(int64_t token, int64_t end) const;  // returns the longest run from `token`, up to `end`
};

// Contiguous rows of one plane and head.
struct RowRun {
  int32_t plane = 0, head = 0;
  int64_t token = 0, n = 0;  // tokens
  std::byte* data = nullptr;
  int64_t bytes = 0;
  const std::byte* piece = nullptr;  // a copy must not cross from one piece to another, as memory is pinned piece by piece
};

enum class RowOrder : uint8_t {
  kByHead,  // head, plane, tokens; then the planes of scope kLayer: to hash, compare and save
  kByRun,   // tokens, plane, head: to copy, as one copy can have the rows of several heads
};

// Walks over the rows of some tokens of a layer. Allocates nothing.
class RowCursor {
 public:
  RowCursor(const StoreView& view, int32_t layer_idx, HeadRange heads, TokenRange tokens, PlaneSet planes, RowOrder order)
      : view_(view), layer_(view.layers[layer_idx]), heads_(heads), tokens_(tokens), planes_(planes), order_(order) {}
  // Also ends runs at multiples of n_tokens, for a destination with pages of that length.
  void stop_at_multiples(int64_t n_tokens) { unit_ = n_tokens; }
  bool next(RowRun* run);  // false: the walk has ended

 private:
  bool next_lane();  // a lane is a plane of a head, or a plane of the layer
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

// Copies all rows of n tokens of a layer from `first` on to tokens from `to_first` on. Each side lies within a page.
void copy_tokens(const StoreView& from, int64_t first, const StoreView& to, int64_t to_first, int32_t layer_idx, int64_t n);

}  // namespace tandem
