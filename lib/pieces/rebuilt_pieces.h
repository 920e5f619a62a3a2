// SPDX-License-Identifier: MIT
// The route "recompute" (KVPR): hidden states cross the bus, and the device makes K and V from them.
//
// A piece has tokens of one or several sequences, for all heads, as many as a buffer holds in 16 bits. Row i of the buffer
// becomes slot i % page_len of page i / page_len of the rebuilt pages. These pages are as long as a window's. Each sequence
// begins a new page. The rows between sequences are rebuilt as well, but never attended.
//
//   buffer of x     | sequence 3: tokens 256 ... 500       |  | sequence 4: tokens 0 ... 130 |
//   rebuilt pages   | page 2           | page 3               | page 0           | page 1   ...     K and V of all heads
//
//   copy stream     fill 0 | fill 1 | fill 2 | fill 0 | fill 1 | ...
//   lane 0                   norm | products | store |  norm | products | store | ...
//   lane 1                              norm | products | store |  norm | products ...
//   caller's                                          attend 0 |  attend 1 ...
//
// There are two lanes. Each is a stream of the session with its own pages and work space, and pieces take turns between
// them. So the steps before and after the products of one piece overlap with the products of the other, and so does
// attention. A lane waits for the caller's stream only before it stores to pages that are still attended. A buffer is free
// as soon as its rows are normalised. If keys are rotated, it is free after the store, which reads positions from the
// buffer. So bus and products do not wait for attention. Calls return once all work has been queued. So the first pieces of
// the next call, of another batch or layer, arrive and are rebuilt while the caller's stream still multiplies for this call
// or waits for other weights. Within a piece a sequence's positions are consecutive, as its keys may be rotated by them.
// Positions for rotation lie behind the hidden states.
//
// Pieces of keys that are streamed take turns with rebuilt pieces. So the bus brings K and V while the device, which may be
// the slower of the two, works on the hidden states that came before.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lib/base/status.h"
#include "lib/pieces/device_window.h"
#include "lib/pieces/route_options.h"
#include "lib/pieces/side_stream.h"
#include "lib/pieces/stream_buffers.h"

namespace tandem {

struct RebuildLayout : PagePlanes {
  static constexpr int32_t kPageLen = kDevicePageLen;
  // Maximum number of pages of a piece, as modules take at most 2^24 rows at once.
  static constexpr int64_t kMostPages = (int64_t{1} << 24) / kPageLen;
  int64_t n_pages = 0;  // pages of a buffer
  int64_t x_bytes = 0;  // bytes of a hidden state
  int64_t page_bytes = 0;

  int64_t n_rows() const { return n_pages * kPageLen; }
  int64_t few_pages() const { return (n_pages + 2) / 3; }  // pages of a piece that bus or device waits for
  int64_t positions_at() const { return device_aligned(n_rows() * x_bytes); }  // offset of the positions in a buffer
};
// layouts: [n_layers]. INVALID_ARGUMENT if a buffer has no room for a page of hidden states. UNSUPPORTED, naming the layer,
// if its keys cannot be made from hidden states: it has no projection, keeps no hidden states, or the library rotates its
// keys (RoPE or k_rotation).
Status make_rebuild_layouts(const std::vector<Layer>& layers, int64_t buffer_bytes, std::vector<RebuildLayout>* layouts);

// True if hidden states have fewer bytes than K and V. Otherwise the route cannot save time.
bool is_rebuild_less(const Layer& layer);

// Tokens [begin, end) of one call of a task. They start at page `first_page` of the piece.
struct RebuiltPart {
  size_t call = 0;
  int64_t begin = 0, end = 0;
  int64_t first_page = 0;

  int64_t n_pages() const {
    return (end + RebuildLayout::kPageLen - 1) / RebuildLayout::kPageLen - begin / RebuildLayout::kPageLen;
  }
};
struct RebuiltPiece {
  size_t first_part = 0, n_parts = 0;
  int64_t n_pages = 0, first_page = 0;  // first_page: among the pages of all pieces
};
struct RebuiltPieces {
  std::vector<RebuiltPart> parts;
  std::vector<RebuiltPiece> pieces;
  int64_t planned_pages = 0;  // expected number of pages in all, gaps included; 0: unknown

  void clear() {
    parts.clear();
    pieces.clear();
    planned_pages = 0;
  }
  bool empty() const { return pieces.empty(); }
  int64_t n_pages() const { return pieces.empty() ? 0 : pieces.back().first_page + pieces.back().n_pages; }
};
// Adds tokens of a call behind the existing parts. `continues`: they may go into the last piece of the previous call. The
// first piece is short, as the device waits for it. The last piece is short, as the bus waits for it.
void add_rebuilt(const RebuildLayout& layout, size_t call, TokenRange tokens, bool continues, RebuiltPieces* pieces);
// Returns how many tokens of [begin, end) are rebuilt if the first `wanted` of them are to be: whole pages, or all.
int64_t rebuilt_tokens(int64_t wanted, int64_t begin, int64_t end);
// Upper bound for all pieces of a call, wherever its chunks begin.
struct RebuiltCount {
  int64_t n_pages = 0, n_parts = 0;

  // n_runs: number of ranges of tokens with consecutive positions.
  void add(int64_t n_tokens, int64_t n_runs);
  // Upper bound of parts, including parts that are cut at a full piece.
  int64_t all_parts(const RebuildLayout& layout) const { return n_parts + n_pages / layout.n_pages + 3; }
};

// A session's buffers of hidden states, one more than there are lanes, and each lane's stream, pages of K and V, and work
// space. Pieces are rebuilt and attended in the same order.
class RebuildBuffers {
 public:
  static constexpr int64_t kLanes = 2, kBuffers = kLanes + 1;

  ~RebuildBuffers();
  RebuildBuffers(const RebuildBuffers&) = delete;
  static int64_t bytes_of(const Device& device, const std::vector<Layer>& layers, std::span<const RebuildLayout> layouts);
  static Status create(const Device& device, Tier& tier, const std::vector<Layer>& layers,
                       const std::vector<RebuildLayout>& layouts, std::unique_ptr<RebuildBuffers>* buffers);
  // Measures the ns to make K and V from one hidden state of a full buffer. Overwrites the pages. No work is in flight on
  // return.
  Status measure(const Layer& layer, const RebuildLayout& layout, const DeviceProjection& projection, double* ns);
  StreamBuffers& x() { return *x_; }
  // Returns a call that rebuilds into the next piece's pages, with its work space. The caller fills in the rows.
  DeviceRebuild call_of(const Layer& layer, const RebuildLayout& layout, const DeviceProjection& projection) const;
  std::byte* pages() const { return memory_.data() + static_cast<int64_t>(lane_idx()) * lane_bytes_; }
  void* stream() const { return lanes_[lane_idx()].side->get(); }  // the next piece's stream
  void* pages_freed() const { return lanes_[lane_idx()].freed; }   // event: the pages of the next piece are no longer in use
  // Hands the pages of the next piece to `stream`: work queued there afterwards finds them rebuilt. take_pages_back() ends
  // this and moves on to the next piece. The pages are rebuilt again only after the work that `stream` had by then.
  Status hand_pages(void* stream) { return lanes_[lane_idx()].side->join(stream); }
  Status take_pages_back(void* stream);
  // For data that all lanes read. fork(): the other lanes wait for work so far on the first. join(): the first waits for all
  // lanes.
  void* first_stream() const { return lanes_[0].side->get(); }
  Status fork();
  Status join();
  void settle(void* stream);  // after a failure: waits until no work is in flight here

 private:
  struct Lane {
    std::unique_ptr<SideStream> side;
    void* freed = nullptr;  // event: the pages have been attended
  };

  explicit RebuildBuffers(const Device& device) : device_(device) {}
  Status put_numbers(const Layer& layer, const RebuildLayout& layout);
  size_t lane_idx() const { return static_cast<size_t>(n_pieces_ % kLanes); }

  const Device& device_;
  std::unique_ptr<StreamBuffers> x_;
  Buffer memory_;
  int64_t lane_bytes_ = 0, workspace_at_ = 0;
  uint64_t n_pieces_ = 0;  // pieces that have been attended
  Lane lanes_[kLanes];
};

}  // namespace tandem
