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
// The tasks of the tickets take rows alone; the last of them is also the one that is not finished while pieces are on their
// way, for the others' slots are waited for meanwhile. Where nothing is streamed yet, a chunk is attended in one go.
#pragma once

#include "lib/attend/lane.h"

namespace tandem {

class LongAppend final : public ChunkWork {
 public:
  explicit LongAppend(SessionCore& core) : core_(core) {}

  // The call's long appends, if there is memory for them and the store can be pinned; call.taken says so. The cache's mutex
  // is held exclusively.
  Status take(Call& call, const CallShape& shape);
  // There was no memory for what the call needs: less is taken for its long appends. False: there is no less.
  bool take_less(Call& call, const Status& lack);
  // Tokens of the next chunk; 0: it is none of these.
  int64_t chunk_len(const Call& call, const ChunkPlace& place) const;
  Status cut(Call& call, int64_t n_tokens, ChunkPlace* place, Chunk* chunk);

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
