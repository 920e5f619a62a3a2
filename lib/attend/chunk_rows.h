// SPDX-License-Identifier: MIT
// How the new rows of a long chunk reach the pages that the device attends and the host's store.
//
// Where the store's extents are pinned, by copies. The append on the caller's stream writes pages and one of two buffers; on
// the side stream the copy engine takes the rows from the buffer to the extents, beside the attention, and a ticket without
// rows says that they are there:
//
//   caller's stream   append -> pages, buffer | attend                    | next chunk: append -> pages, other buffer | ...
//   side stream                               | copies: buffer -> extents | ticket    | copies ...
//
// Else by tickets of 512 rows each, whose slots the host's thread empties:
//
//   caller's stream                                       | attend
//   side stream       append -> pages, slot | append ...  |
#pragma once

#include "lib/attend/call.h"

namespace tandem {

class ChunkRows {
 public:
  explicit ChunkRows(SessionCore& core) : core_(core) {}

  // Pins what the call's new rows go to, and says in call.taken.prefill whether they are copied there. The cache's mutex is
  // held exclusively.
  void choose_way(Call& call);
  // Tasks of a chunk of n_tokens; the last one is the chunk's own.
  static int64_t n_tasks(const PrefillSize& size, int64_t n_tokens);
  // Fills these tasks. The cache's mutex is held exclusively.
  void prepare(Call& chunk);
  // Descriptors of the tickets that bring rows, behind that of the chunk. Returns how many.
  static int64_t describe_tickets(const Call& chunk, const DeviceSequence& of_chunk, DeviceSequence* tickets);
  // append: the whole chunk, with its descriptor; tickets: in device memory, as described. From here on the caller's stream
  // finds the rows in their pages, and the tasks are posted.
  Status send(const Call& chunk, const DeviceAppend& append, const DeviceSequence* tickets);

 private:
  Status copy(const Call& chunk, const DeviceAppend& append);
  Status post_empty(const Call& chunk, const DeviceAppend& append) const;
  Status send_by_tickets(const Call& chunk, const DeviceAppend& append, const DeviceSequence* tickets) const;

  SessionCore& core_;
  CopyList copies_;                            // of the chunk that is prepared
  int64_t buffers_at_ = 0, buffer_bytes_ = 0;  // of the chunk before
};

}  // namespace tandem
