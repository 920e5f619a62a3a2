// SPDX-License-Identifier: MIT
// Cuts keys of the host into pieces for the route "stream" and lays them out in a buffer on the device.
//
// A piece is a group of KV heads x a range of tokens of one sequence and layer. Its buffer is laid out like window pages, so
// the same kernels attend it. But a page there is as long as an extent of the store (lib/store/page_store.h), with planes in
// the same order as in an extent. So a sequence that has grown alone is copied an extent at a time:
//
//   extent:  ... | layer: K head 0 [2048 rows] | K head 1 | ... | V head 0 | ... | ...      one copy for all heads
//   page:          layer: K head 0 [2048 rows] | K head 1 | ... | V head 0 | ...
//
// Ranges begin at multiples of a buffer's tokens, so token t is in page t / page_len % n_pages of any buffer.
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
  int32_t n_heads = 0;   // KV heads of a piece; the last group may have fewer
  int64_t n_pages = 0;   // pages of a buffer
  int64_t page_bytes = 0;
  int64_t buffer_bytes = 0;
  int32_t most_heads = 0;

  int64_t piece_len() const { return n_pages * page_len; }
};
// extent_len: tokens of the store's extents. most_heads: of a piece. INVALID_ARGUMENT if a buffer has no room for 64 tokens
// of one KV head.
Status make_stream_layout(const Layer& layer, int64_t extent_len, int64_t buffer_bytes, StreamLayout* layout,
                          int32_t most_heads = INT32_MAX);

// Returns the layout for a call whose sequences stream at most `longest` keys each. If a page has room for more keys than
// that, pages get shorter and a piece gets more heads.
StreamLayout shorten_pages(const Layer& layer, const StreamLayout& layout, int64_t longest);

// layouts: [n_layers]; empty if the policy leaves no keys to stream in any layer.
Status make_stream_layouts(const std::vector<Layer>& layers, const LayerPolicies& policies, int64_t extent_len,
                           const RouteOptions& routes, std::vector<StreamLayout>* layouts);

struct StreamPiece {
  size_t call = 0;  // index among the task's calls
  int32_t first_head = 0, n_heads = 0;
  int64_t begin = 0, end = 0;
  size_t first_range = 0, n_ranges = 0;  // the chunk's ranges that are sent; none: all tokens are sent
};
// heads: runs of the heads that are sent.
int64_t count_pieces(const StreamLayout& layout, std::span<const HeadRun> heads, int64_t begin, int64_t end);
// Appends the pieces of tokens [begin, end) in sending order: one group of heads after another.
void cut_pieces(const StreamLayout& layout, std::span<const HeadRun> heads, size_t call, TokenRange tokens,
                std::vector<StreamPiece>* pieces);

// A list of copies in the order of add(). Copies are merged where possible.
class CopyList {
 public:
  void clear() { copies_.clear(); }
  // The next copy is not merged with earlier ones. Memory may be pinned in parts, and no copy may cross the end of a part.
  void cut() { is_cut_ = true; }
  // Later copies are of this page of the window. A copy continues from one page to the next only if the two are adjacent in
  // the same allocation. Returns the page.
  std::byte* begin_page(const DeviceWindow& window, int64_t token, int64_t page_bytes) {
    const int64_t page = window.page_of(token);
    if (page != last_page_ + page_bytes || window.begins_allocation(page)) cut();
    last_page_ = page;
    return reinterpret_cast<std::byte*>(page);
  }
  void add(std::byte* to, const std::byte* from, int64_t bytes);
  // For stored rows. A copy stays within one pinned piece.
  void add(std::byte* to, const RowRun& from);
  void add(const RowRun& to, const std::byte* from);
  const std::vector<StridedCopy>& copies() const { return copies_; }

 private:
  std::vector<StridedCopy> copies_;
  const std::byte* piece_ = nullptr;  // pinned piece of the last rows
  int64_t last_page_ = 0;             // address
  bool is_cut_ = false;
};

}  // namespace tandem
