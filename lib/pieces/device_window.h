// SPDX-License-Identifier: MIT
// A ring of pages in device memory for a sequence's newest tokens. Tokens wrap around the ring, so eviction moves no data.
// The ring has a fixed number of places. A place gets its page when tokens reach it, so a short sequence has only the pages
// that its tokens fill. A page holds every layer, so one table serves all layers:
//
//   page:  layer 0: K head 0 [page_len rows] | K head 1 | ... | K scales | V head 0 | ... | MAW | bounds   layer 1: ...
//
// A layer with a pruning policy also has bounds of its chunks of keys there (lib/tables/search.h). Beside the pages, the
// window then has the lists that decode calls keep.
//
// A token's rows become valid by the call that appends the token, or by a copy from the host store. They stay valid until
// another token takes their slot. Missing rows are copied when they are needed (lib/attend/window_fill.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lib/base/memory.h"
#include "lib/pieces/search_counts.h"
#include "lib/policy/policy.h"
#include "lib/store/row_cursor.h"
#include "lib/tables/device.h"

namespace tandem {

inline constexpr int32_t kDevicePageLen = 128;

// Alignment in bytes of blocks in device memory and in memory that a device shares.
inline constexpr int64_t kDeviceAlignment = 256;
inline int64_t device_aligned(int64_t bytes) { return (bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment; }

// Planes of a layer in a page of device memory, one after another. Heads lie side by side within a plane.
struct PagePlanes {
  PlaneBytes row_bytes;
  int64_t at[kPlanes] = {};           // offset of the first KV head in a page
  int64_t head_stride[kPlanes] = {};  // bytes

  // Lays out the planes from byte `begin` of a page, at multiples of `unit` behind the first. Returns the end of the last
  // plane.
  int64_t lay_out(const Layer& layer, int64_t n_heads, int64_t page_len, int64_t begin = 0, int64_t unit = 1);
  std::byte* row(std::byte* page, int32_t plane, int64_t head, int64_t slot) const {
    return page + at[plane] + head * head_stride[plane] + slot * row_bytes.of[plane];
  }
  DevicePages pages(std::byte* first, int32_t page_len) const;  // as kernels read them
};

struct WindowGeometry {
  int64_t page_bytes = 0;
  struct LayerPlanes : PagePlanes {
    int64_t bytes = 0;    // of the layer's part of a page
    int64_t maw_at = -1;  // offset of f32 [n_q_heads][page_len]; -1: the layer keeps no MAW
    // Bounds of chunks of one length: [n_kv_heads] rows per page. `at` is an offset in a page.
    struct Bounds {
      int64_t chunk_len = 0, at = 0, head_stride = 0;
    };
    std::vector<Bounds> bounds;
    int64_t kept_at = -1;  // offset of the layer's lists among the sequence's; -1: it keeps none
  };
  std::vector<LayerPlanes> layers;
  int64_t kept_bytes = 0;  // of a sequence's lists, over all layers
};
WindowGeometry make_window_geometry(const std::vector<Layer>& layers, const LayerPolicies& policies, const Pruning& pruning);

// Places of a ring for calls with up to q_len queries.
int64_t ring_pages(const PolicyOptions& options, int64_t cache_page_len, int64_t q_len);
// Number of places with pages, for a sequence of `length` tokens.
constexpr int64_t filled_pages(int64_t n_places, int64_t length) {
  return std::min(n_places, (length + kDevicePageLen - 1) / kDevicePageLen);
}

class DeviceWindow {
 public:
  // Makes a ring of at least n_places places, with pages for the newest tokens of [0, length). Valid tokens of [0, end) stay
  // valid. On failure nothing changes.
  Status reserve(Tier& device_tier, const WindowGeometry& geometry, int64_t n_places, int64_t end, int64_t length);
  int64_t n_pages() const { return static_cast<int64_t>(table_.size()); }  // places of the ring
  // Addresses of pages: token t is in entry t / page_len % n. 0: no page yet.
  const std::vector<int64_t>& table() const { return table_; }
  int64_t any_page() const;  // address of any page; there must be one
  int64_t page_of(int64_t token) const { return table_[static_cast<size_t>(token / kDevicePageLen % n_pages())]; }
  // True if the page is the first of an allocation. The page before it in memory may be in another allocation, and a device
  // refuses copies with rows of both.
  bool begins_allocation(int64_t page) const;

  // For layers with a pruning policy. Chunks within the first bounded() tokens have bounds. Lists with another mark than
  // kept_mark() are out of date.
  int64_t bounded(size_t layer_idx) const { return kept_[layer_idx].bounded; }
  uint32_t kept_mark(size_t layer_idx) const { return kept_[layer_idx].mark; }
  // The host's knowledge of the lists that searches have left in kept_lists().
  KeptStages& kept_stages(size_t layer_idx) { return kept_[layer_idx].stages; }
  const KeptStages& kept_stages(size_t layer_idx) const { return kept_[layer_idx].stages; }
  void set_bounded(size_t layer_idx, int64_t n_tokens) { kept_[layer_idx].bounded = n_tokens; }
  void forget_lists(size_t layer_idx) {
    if (!kept_.empty()) ++kept_[layer_idx].mark;
  }
  void forget_lists() {
    for (Kept& layer : kept_) ++layer.mark;
  }
  Buffer& kept_lists() { return kept_lists_; }  // of all layers; zero at first
  const Buffer& kept_lists() const { return kept_lists_; }

  // Returns true once for each layer, before any device work on the layer's part of the pages.
  bool begin_use(size_t layer_idx) { return !std::exchange(is_used_[layer_idx], uint8_t{1}); }
  // True if two layers of a ring with pages hold the same tokens.
  bool are_alike(size_t layer_idx, size_t other) const {
    const TokenRange &of = valid_[layer_idx], &others = valid_[other];
    return ((of.begin ^ others.begin) | (of.end ^ others.end)) == 0;
  }
  // The layers' calls have written the same tokens as layer `first`, whose tokens the window already knows. All of these
  // layers had the same tokens before.
  void follow(size_t first, std::span<const size_t> layers) {
    for (const size_t l : layers) {
      valid_[l] = valid_[first];
      is_used_[l] = 1;
    }
  }
  TokenRange valid(size_t layer_idx) const { return valid_.empty() ? TokenRange() : valid_[layer_idx]; }
  // Tokens [begin, end) have been written. They adjoin the valid tokens or replace them.
  void extend(size_t layer_idx, int64_t begin, int64_t end);
  // Tokens up to `end` are about to be written. Tokens that share slots with them become invalid.
  void make_way(size_t layer_idx, int64_t end);
  // Likewise for tokens from `begin` on that are older than valid ones.
  void make_way_for_older(size_t layer_idx, int64_t begin);
  void cut(int64_t end);  // tokens from `end` on become invalid, in all layers
  void cut(size_t layer_idx, int64_t end);
  // First token whose newest MAW are in the window. The session has the MAW of earlier tokens.
  static constexpr int64_t kNoMaw = INT64_MAX;
  int64_t maw_begin(size_t layer_idx) const { return maw_begin_.empty() ? kNoMaw : maw_begin_[layer_idx]; }
  bool has_maw(size_t layer_idx) const { return maw_begin(layer_idx) != kNoMaw; }
  void set_maw(size_t layer_idx, int64_t begin) {
    if (!has_maw(layer_idx)) maw_begin_[layer_idx] = begin;
  }
  void forget_maw(size_t layer_idx) {
    if (!maw_begin_.empty()) maw_begin_[layer_idx] = kNoMaw;
  }

 private:
  bool has_pages(int64_t length) const;
  void move_pages(std::vector<int64_t>* table, std::vector<int64_t>* others, int64_t end) const;

  std::vector<Buffer> pages_;  // several if the window has grown
  std::vector<int64_t> table_;
  std::vector<TokenRange> valid_;  // [n_layers], like the members below
  std::vector<int64_t> maw_begin_;
  std::vector<uint8_t> is_used_;
  struct Kept {
    int64_t bounded = 0;
    uint32_t mark = 1;
    KeptStages stages;
  };
  std::vector<Kept> kept_;
  Buffer kept_lists_;
};

}  // namespace tandem
