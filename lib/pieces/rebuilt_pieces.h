// SPDX-License-Identifier: MIT
// The route "recompute" (KVPR): hidden states cross the bus, and the device makes K and V of them.
//
// A piece is tokens of one or several sequences, all heads: what fits into a buffer of hidden states. There a token's row is
// where its keys will be in the pages that are rebuilt of it, which are as long as a window's, so that row i of the buffer
// is slot i % page_len of page i / page_len. A sequence begins a page of its own; what lies between is rebuilt as well, and
// nobody attends it.
//
//   buffer of x     | sequence 3: tokens 256 ... 500       |  | sequence 4: tokens 0 ... 130 |
//   rebuilt pages   | page 2           | page 3               | page 0           | page 1   ...     K and V of all heads
//
//   copy stream     fill 0 | fill 1 | fill 2 | fill 0 | fill 1 | ...
//   lane 0                   norm | products | store |  norm | products | store | ...
//   lane 1                              norm | products | store |  norm | products ...
//   caller's                                          attend 0 |  attend 1 ...
//
// There are two lanes, streams of the session's own with pages and work space of their own, which pieces go to in turn: what
// comes before and behind the products of one goes on beside those of the other, and so does the attention. A lane waits for
// nothing of the caller's but for its pages, when it has sums to store there, and a buffer is free as soon as what it held
// is normalised, but where keys are rotated, whose positions the store reads there: bus and products do not wait for
// attention. Calls return when all is on its way, so the first pieces of the next call, of another batch or layer, come and
// are rebuilt while the caller's stream still multiplies for this one, or waits for other weights. In one piece a sequence
// has positions that follow each other, as its keys may be rotated by them; where they are, these come behind the hidden
// states.
//
// Where other keys come as they are, their pieces take turns with these: the bus brings K and V while the device, which may
// be the slower of the two, makes those of what has come before.
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
  static constexpr int64_t kMostPages = (int64_t{1} << 24) / kPageLen;  // of a piece: modules take so many rows at once
  int64_t n_pages = 0;                                                  // of a buffer
  int64_t x_bytes = 0;                                                  // of a hidden state
  int64_t page_bytes = 0;

  int64_t n_rows() const { return n_pages * kPageLen; }
  int64_t few_pages() const { return (n_pages + 2) / 3; }                      // of pieces that somebody waits for
  int64_t positions_at() const { return device_aligned(n_rows() * x_bytes); }  // of pages, in a buffer
};
// [n_layers]. INVALID_ARGUMENT where a buffer has no room for a page of hidden states; UNSUPPORTED, naming the layer, where
// keys cannot be made of hidden states: no projection, none kept, keys that the library rotates or has rotated.
Status make_rebuild_layouts(const std::vector<Layer>& layers, int64_t buffer_bytes, std::vector<RebuildLayout>* layouts);

// Whether the bus has less to carry than of K and V, which it must for the route to take less time.
bool is_rebuild_less(const Layer& layer);

// Tokens [begin, end) of one call of a task, from page `first_page` of the piece on.
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
  int64_t n_pages = 0, first_page = 0;  // the latter of those of all pieces
};
struct RebuiltPieces {
  std::vector<RebuiltPart> parts;
  std::vector<RebuiltPiece> pieces;
  int64_t planned_pages = 0;  // what there will be in all, with what gaps leave of pages; 0: nobody knows

  void clear() {
    parts.clear();
    pieces.clear();
    planned_pages = 0;
  }
  bool empty() const { return pieces.empty(); }
  int64_t n_pages() const { return pieces.empty() ? 0 : pieces.back().first_page + pieces.back().n_pages; }
};
// Where [begin, end) of a call goes, behind what is there: where `continues`, into the piece of the call before it. The
// first piece is short, as the device waits for it, and so is the last one, for which the bus does.
void add_rebuilt(const RebuildLayout& layout, size_t call, TokenRange tokens, bool continues, RebuiltPieces* pieces);
// How many tokens of [begin, end) are rebuilt where `wanted` are to be, the first ones: whole pages, or all.
int64_t rebuilt_tokens(int64_t wanted, int64_t begin, int64_t end);
// What there may be in all pieces of a call, wherever its chunks begin.
struct RebuiltCount {
  int64_t n_pages = 0, n_parts = 0;

  // n_runs: of tokens whose positions follow each other.
  void add(int64_t n_tokens, int64_t n_runs);
  // With parts that are cut where a piece is full.
  int64_t all_parts(const RebuildLayout& layout) const { return n_parts + n_pages / layout.n_pages + 3; }
};

// What a session rebuilds in: buffers of hidden states, one more than there are lanes; and of each lane its stream, pages of
// K and V, work space. Pieces are rebuilt and attended in one order.
class RebuildBuffers {
 public:
  static constexpr int64_t kLanes = 2, kBuffers = kLanes + 1;

  ~RebuildBuffers();
  RebuildBuffers(const RebuildBuffers&) = delete;
  static int64_t bytes_of(const Device& device, const std::vector<Layer>& layers, std::span<const RebuildLayout> layouts);
  static Status create(const Device& device, Tier& tier, const std::vector<Layer>& layers,
                       const std::vector<RebuildLayout>& layouts, std::unique_ptr<RebuildBuffers>* buffers);
  // ns that making K and V of a hidden state takes, where a buffer is full of them. What is in the pages is lost, nothing is
  // under way.
  Status measure(const Layer& layer, const RebuildLayout& layout, const DeviceProjection& projection, double* ns);
  StreamBuffers& x() { return *x_; }
  // Into the pages of the next piece, with the work space; of which rows is to be said yet.
  DeviceRebuild call_of(const Layer& layer, const RebuildLayout& layout, const DeviceProjection& projection) const;
  std::byte* pages() const { return memory_.data() + static_cast<int64_t>(lane_idx()) * lane_bytes_; }
  void* stream() const { return lanes_[lane_idx()].side->get(); }  // of the next piece
  void* pages_freed() const { return lanes_[lane_idx()].freed; }   // event: nobody is at the pages of the next piece
  // What is asked of `stream` next finds the pages as they were rebuilt; those are rebuilt again behind what it was asked
  // for until take_pages_back(), with which the piece after is the next.
  Status hand_pages(void* stream) { return lanes_[lane_idx()].side->join(stream); }
  Status take_pages_back(void* stream);
  // Of what all lanes read: fork(): the others come behind what the first was asked for; join(): the first behind all.
  void* first_stream() const { return lanes_[0].side->get(); }
  Status fork();
  Status join();
  void settle(void* stream);  // after a failure: nothing is under way here any more

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
  uint64_t n_pieces_ = 0;  // that have been attended
  Lane lanes_[kLanes];
};

}  // namespace tandem
