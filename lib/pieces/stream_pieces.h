// SPDX-License-Identifier: MIT
// How keys of the host are cut for the route "stream", and where they lie in a buffer on the device.
//
// A piece is a group of KV heads x a range of tokens of one sequence and layer. In its buffer it has the layout of window
// pages, so that the kernels attend it like these; but a page there is as long as an extent of the store
// (lib/store/page_store.h) and its planes follow each other as they do in one. A sequence that has grown alone is then
// copied an extent at a time:
//
//   extent:  ... | layer: K head 0 [2048 rows] | K head 1 | ... | V head 0 | ... | ...      one copy for all heads
//   page:          layer: K head 0 [2048 rows] | K head 1 | ... | V head 0 | ...
//
// Ranges begin at multiples of what a buffer holds, so that token t is in page t / page_len % n_pages of any buffer.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/base/status.h"
#include "lib/pieces/device_window.h"
#include "lib/pieces/route_options.h"
#include "lib/policy/streaming_heads.h"

namespace tandem {

struct StreamLayout : PagePlanes {
  int32_t page_len = 0;  // a multiple of 64
  int32_t n_heads = 0;   // KV heads of a piece, but for the last group
  int64_t n_pages = 0;   // of a buffer
  int64_t page_bytes = 0;
  int64_t buffer_bytes = 0;
  int32_t most_heads = 0;

  int64_t piece_len() const { return n_pages * page_len; }
};
// extent_len: tokens of the store's extents; most_heads: of a piece. INVALID_ARGUMENT where a buffer has no room for 64
// tokens of one KV head.
Status make_stream_layout(const Layer& layer, int64_t extent_len, int64_t buffer_bytes, StreamLayout* layout,
                          int32_t most_heads = INT32_MAX);

// Of a call whose sequences have `longest` keys to stream at most: where that is less than a page has room for, pages are
// shorter and a piece has more heads.
StreamLayout shorten_pages(const Layer& layer, const StreamLayout& layout, int64_t longest);

// [n_layers]; empty where the policy leaves nothing to stream in any layer.
Status make_stream_layouts(const std::vector<Layer>& layers, const LayerPolicies& policies, int64_t extent_len,
                           const RouteOptions& routes, std::vector<StreamLayout>* layouts);

struct StreamPiece {
  size_t call = 0;  // of the task's
  int32_t first_head = 0, n_heads = 0;
  int64_t begin = 0, end = 0;
  size_t first_range = 0, n_ranges = 0;  // of the chunk's ranges, what is sent of these tokens; none: all of them
};
// heads: runs of those that are sent.
int64_t count_pieces(const StreamLayout& layout, std::span<const HeadRun> heads, int64_t begin, int64_t end);
// Those of tokens [begin, end), in the order in which they are sent: a group of heads after the other.
void cut_pieces(const StreamLayout& layout, std::span<const HeadRun> heads, size_t call, TokenRange tokens,
                std::vector<StreamPiece>* pieces);

// Copies in the order of add(), of which those that can be one are one.
class CopyList {
 public:
  void clear() { copies_.clear(); }
  // What is added next is a copy of its own: memory may be pinned in parts, and no copy is to reach over their ends.
  void cut() { is_cut_ = true; }
  // What is added next is of this page of the window. A copy goes on only from a page to the one behind it in the same
  // allocation. Returns the page.
  std::byte* begin_page(const DeviceWindow& window, int64_t token, int64_t page_bytes) {
    const int64_t page = window.page_of(token);
    if (page != last_page_ + page_bytes || window.begins_allocation(page)) cut();
    last_page_ = page;
    return reinterpret_cast<std::byte*>(page);
  }
  void add(std::byte* to, const std::byte* from, int64_t bytes);
  // Stored rows; a copy has those of one piece that is pinned.
  void add(std::byte* to, const RowRun& from);
  void add(const RowRun& to, const std::byte* from);
  const std::vector<StridedCopy>& copies() const { return copies_; }

 private:
  std::vector<StridedCopy> copies_;
  const std::byte* piece_ = nullptr;  // of the last rows
  int64_t last_page_ = 0;             // address
  bool is_cut_ = false;
};

}  // namespace tandem
