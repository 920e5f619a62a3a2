// SPDX-License-Identifier: MIT
// Long appends, one chunk of thousands of tokens at a time (lib/routes/prefill_size.h). Their keys outside the window, if
// any, cross the bus:
//
// clang-format off
//   keys       brings the whole layer where head patterns choose among all keys and the window has only the newest
//              (whole_layer.h)
//   rows       go to pages of the window, or of the work space where the ring is too short, and to the host (chunk_rows.h)
//   search     finds the keys of each query block where the policy names keys, which all are on the device (search_call.h)
//   for a group of KV heads:
//     pieces   attend a piece, adding the states of the pieces before | send the next piece
//     chunk    attend window and chunk, adding the states of the pieces, into the caller's tensors
//   keep       copies the chunk's tokens that stay in the window, from pages of the work space
//   count      counts the weights of the last queries, by a ticket of their own, where the policy counts attention weights
// clang-format on
//
// The chunk's own task stays unfinished until all pieces have left the host. If nothing is streamed, a chunk is attended in
// one launch.
#pragma once

#include "lib/attend/chunk_rows.h"
#include "lib/attend/lane.h"
#include "lib/attend/named_tiles.h"
#include "lib/attend/whole_layer.h"

namespace tandem {

class LongAppend final : public ChunkWork {
 public:
  explicit LongAppend(SessionCore& core) : core_(core), rows_(core) {}

  // Sizes the call's long appends and pins the store, if the device allows it. Stores the size in call.taken.prefill. The
  // cache's mutex is held exclusively.
  Status size_and_pin(Call& call, const CallShape& shape);
  // Chooses a smaller size after a lack of memory. Returns false if there is none.
  bool retry_smaller(Call& call, const Status& lack);
  // Returns the tokens of the next long chunk; 0 if the next chunk is an ordinary one.
  int64_t chunk_len(const Call& call, const ChunkPlace& place) const;
  Status next_chunk(Call& call, int64_t n_tokens, ChunkPlace* place, Chunk* chunk);

  Status prepare(Call& chunk) override;
  Status fill(Call& chunk) override;
  Status launch(Call& chunk) override;
  Status commit(Call& chunk) override;

 private:
  struct Work;  // of launch()
  KeyRoute& route() const { return *core_.key_routes[kPlanStream]; }
  std::byte* page_of(const Call& chunk, int64_t page) const;
  void choose_pieces(Call& chunk);
  void expect_pieces(const Call& chunk) const;
  void count_named(const Call& chunk);
  Status describe(Call& chunk, Work* work) const;
  DeviceAppend append_of_chunk(const Call& chunk, const DeviceSequences& sequences) const;
  Status launch_all(Call& chunk, Work& work);
  Status wait_for_rows(const Call& chunk) const;
  Status name_window(const Call& chunk, const Work& work, HeadRange heads, DeviceAttend* launch);
  Status name_piece(const Call& chunk, size_t piece, HeadRange heads, DeviceAttend* launch);
  Status attend_group(const Call& chunk, Work& work, const HeadRun& heads);
  Status keep_window(const Call& chunk) const;
  Status give_lse(const Call& chunk) const;
  Status count_tail(const Call& chunk) const;
  void prepare_count(Call& tail) const;
  Status launch_count(Call& tail, const float* lse) const;

  SessionCore& core_;
  ChunkRows rows_;
  NamedTiles tiles_;                  // named keys of the chunk
  WholeLayer whole_;                  // for calls that bring all keys of the layer
  bool is_last_ = false;              // the chunk has its sequence's last queries
  std::vector<int64_t> piece_table_;  // pages of a piece's buffer
};

}  // namespace tandem
