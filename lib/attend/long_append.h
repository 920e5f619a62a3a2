// SPDX-License-Identifier: MIT
// Long appends, a chunk of thousands of tokens at a time (lib/routes/prefill_size.h), whose keys outside the window come
// over the bus, if there are any:
//
// clang-format off
//   keys       of the whole layer, where head patterns choose among all and the window has the newest alone (whole_layer.h)
//   rows       to pages of the window, or of the work space where the ring is too short, and to the host (chunk_rows.h)
//   search     where the policy names keys, all of which are on the device: for those of each query block (search_call.h)
//   for a group of KV heads:
//     pieces   attend, with the states of those before | send the next piece
//     chunk    attend to the window and the chunk's own keys, with the states of the pieces, into the caller's tensors
//   keep       what of the chunk the window is to have, from pages of the work space
//   count      where the policy counts attention weights: the last queries, by a ticket of their own
// clang-format on
//
// The chunk's own task stays unfinished until all pieces have left the host. Where nothing is streamed, a chunk is attended
// in one go.
#pragma once

#include "lib/attend/chunk_rows.h"
#include "lib/attend/lane.h"
#include "lib/attend/named_tiles.h"
#include "lib/attend/whole_layer.h"

namespace tandem {

class LongAppend final : public ChunkWork {
 public:
  explicit LongAppend(SessionCore& core) : core_(core), rows_(core) {}

  // Sizes the call's long appends and pins the store, if the device allows that; call.taken.prefill says so. The cache's
  // mutex is held exclusively.
  Status size_and_pin(Call& call, const CallShape& shape);
  // After a lack of memory: a smaller size is to be tried. False: there is none.
  bool retry_smaller(Call& call, const Status& lack);
  // Tokens of the next long chunk; 0: the next chunk is an ordinary one.
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
  NamedTiles tiles_;                  // of the chunk
  WholeLayer whole_;                  // where the call brings all keys of the layer
  bool is_last_ = false;              // the chunk has its sequence's last queries
  std::vector<int64_t> piece_table_;  // pages of a buffer
};

}  // namespace tandem
