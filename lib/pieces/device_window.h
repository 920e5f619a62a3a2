// SPDX-License-Identifier: MIT
// Where a sequence's newest tokens lie in device memory: a ring of pages through which they go round, so that eviction moves
// nothing. The ring has its length from the beginning, and its places get pages as tokens come: a short sequence has as many
// as its tokens fill. A page has every layer, so one table serves them all:
//
//   page:  layer 0: K head 0 [page_len rows] | K head 1 | ... | K scales | V head 0 | ... | MAW | bounds   layer 1: ...
//
// A layer whose policy prunes has bounds of its keys' chunks there (lib/tables/search.h), and beside the pages the window
// has the lists that decode calls keep.
//
// The rows of a token are valid from the call that appended it, or from a copy out of the host store, until its slot is
// written again; what is missing is copied when it is needed (lib/attend/window_fill.h).
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

// Where things begin in device memory, and in memory that a device shares: multiples of this many bytes.
inline constexpr int64_t kDeviceAlignment = 256;
inline int64_t device_aligned(int64_t bytes) { return (bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment; }

// Planes of a layer in a page of device memory: one behind the other, and in each its heads side by side.
struct PagePlanes {
  PlaneBytes row_bytes;
  int64_t at[kPlanes] = {};           // of the first KV head in a page
  int64_t head_stride[kPlanes] = {};  // bytes

  // From byte `begin` of a page on, each plane at a multiple of `unit` behind the first. Returns where they end.
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
    int64_t maw_at = -1;  // f32 [n_q_heads][page_len]; -1: none are kept
    // Bounds of chunks of these lengths, [n_kv_heads] rows of a page each: data is an offset in a page.
    struct Bounds {
      int64_t chunk_len = 0, at = 0, head_stride = 0;
    };
    std::vector<Bounds> bounds;
    int64_t kept_at = -1;  // of the layer's lists among those of the sequence; -1: none are kept
  };
  std::vector<LayerPlanes> layers;
  int64_t kept_bytes = 0;  // lists of a sequence, of all layers
};
WindowGeometry make_window_geometry(const std::vector<Layer>& layers, const LayerPolicies& policies, const Pruning& pruning);

// Places of a ring for calls of up to q_len queries.
int64_t ring_pages(const PolicyOptions& options, int64_t cache_page_len, int64_t q_len);
// How many of the places have pages, of a sequence of `length` tokens.
constexpr int64_t filled_pages(int64_t n_places, int64_t length) {
  return std::min(n_places, (length + kDevicePageLen - 1) / kDevicePageLen);
}

class DeviceWindow {
 public:
  // A ring of n_places places at least, with pages for the last tokens of [0, length). Tokens of [0, end) that are valid
  // stay so. Strong.
  Status reserve(Tier& device_tier, const WindowGeometry& geometry, int64_t n_places, int64_t end, int64_t length);
  int64_t n_pages() const { return static_cast<int64_t>(table_.size()); }  // places of the ring
  // Addresses of pages: token t is in entry t / page_len % n. 0: the place has no page yet.
  const std::vector<int64_t>& table() const { return table_; }
  int64_t any_page() const;  // the address of some page; there is one
  int64_t page_of(int64_t token) const { return table_[static_cast<size_t>(token / kDevicePageLen % n_pages())]; }
  // Whether the page is the first of an allocation. The page before it in memory may be of another one, and a device refuses
  // copies that have rows of both.
  bool begins_allocation(int64_t page) const;

  // For layers whose policy prunes. The chunks that lie in the first bounded() tokens have bounds. Lists that were made
  // under another mark than kept_mark() are out of date.
  int64_t bounded(size_t layer_idx) const { return kept_[layer_idx].bounded; }
  uint32_t kept_mark(size_t layer_idx) const { return kept_[layer_idx].mark; }
  // What searches have left in kept_lists(), as the host knows it.
  KeptStages& kept_stages(size_t layer_idx) { return kept_[layer_idx].stages; }
  const KeptStages& kept_stages(size_t layer_idx) const { return kept_[layer_idx].stages; }
  void set_bounded(size_t layer_idx, int64_t n_tokens) { kept_[layer_idx].bounded = n_tokens; }
  void forget_lists(size_t layer_idx) {
    if (!kept_.empty()) ++kept_[layer_idx].mark;
  }
  void forget_lists() {
    for (Kept& layer : kept_) ++layer.mark;
  }
  Buffer& kept_lists() { return kept_lists_; }  // of all layers, zero at first
  const Buffer& kept_lists() const { return kept_lists_; }

  // Says once of each layer that no device work has been asked for on its part of the pages so far.
  bool begin_use(size_t layer_idx) { return !std::exchange(is_used_[layer_idx], uint8_t{1}); }
  // Whether two layers of a ring that has pages have the same tokens.
  bool are_alike(size_t layer_idx, size_t other) const {
    const TokenRange &of = valid_[layer_idx], &others = valid_[other];
    return ((of.begin ^ others.begin) | (of.end ^ others.end)) == 0;
  }
  // Calls of these layers have written the tokens that one of layer `first` has, which the window has been told of. They had
  // the same tokens before.
  void follow(size_t first, std::span<const size_t> layers) {
    for (const size_t l : layers) {
      valid_[l] = valid_[first];
      is_used_[l] = 1;
    }
  }
  TokenRange valid(size_t layer_idx) const { return valid_.empty() ? TokenRange() : valid_[layer_idx]; }
  // Tokens [begin, end) have been written: next to the valid ones or instead of them.
  void extend(size_t layer_idx, int64_t begin, int64_t end);
  // Tokens up to `end` are about to be written: what shares slots with them is not valid any more.
  void make_way(size_t layer_idx, int64_t end);
  // Likewise, of tokens from `begin` on that are older than valid ones.
  void make_way_for_older(size_t layer_idx, int64_t begin);
  void cut(int64_t end);  // no token from `end` on is valid any more, in any layer
  void cut(size_t layer_idx, int64_t end);
  // Where the tokens begin whose newest MAW are here; of others the session has them.
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

  std::vector<Buffer> pages_;  // several where it has grown
  std::vector<int64_t> table_;
  std::vector<TokenRange> valid_;  // [n_layers], as what follows
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
