// SPDX-License-Identifier: MIT
// Long appends where keys come over the bus, a chunk of thousands of tokens at a time (lib/routes/prefill_size.h):
//
// clang-format off
//   caller's stream                                                            side stream
//   for a group of KV heads:                                                   rows: append of all tickets, into pages
//     pieces   attend, with the states of those before | send the next piece   of the work space and to the host
//     chunk    attend to the window and the chunk's own keys, with the         |
//              states of the pieces, into the caller's tensors        <- join -'
//   keep       what of the chunk the window is to have
//   count      where the policy counts attention weights: the last queries, by a ticket of their own
// clang-format on
//
// The tickets' tasks only take rows. The last task also stays unfinished until all pieces have left the host: the slots of
// the others are needed earlier. Where nothing is streamed yet, a chunk is attended in one go.
#pragma once

#include "lib/attend/lane.h"

namespace tandem {

class LongAppend final : public ChunkWork {
 public:
  explicit LongAppend(SessionCore& core) : core_(core) {}

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
  void expect_pieces(const Call& chunk) const;
  Status describe(Call& chunk, Work* work) const;
  Status launch_all(Call& chunk, Work& work) const;
  Status hand_over_rows(const Call& chunk, const Work& work) const;
  Status attend_group(const Call& chunk, Work& work, const HeadRun& heads) const;
  Status keep_window(const Call& chunk) const;
  Status give_lse(const Call& chunk) const;
  Status count_tail(const Call& chunk) const;
  void prepare_count(Call& tail) const;
  Status launch_count(Call& tail, const float* lse) const;

  SessionCore& core_;
};

}  // namespace tandem
