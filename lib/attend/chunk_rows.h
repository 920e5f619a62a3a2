// SPDX-License-Identifier: MIT
// Brings the new rows of a long chunk to the pages that the device attends and to the host's store.
//
// Copies bring the rows to the store if its extents are pinned. The append on the caller's stream writes pages and one of
// two buffers. On the side stream the copy engine copies the rows from the buffer to the extents while the attention runs. A
// ticket without rows then tells the host that they have arrived:
//
//   caller's stream   append -> pages, buffer | attend                    | next chunk: append -> pages, other buffer | ...
//   side stream                               | copies: buffer -> extents | ticket    | copies ...
//
// Otherwise tickets of 512 rows each bring them, and the session's host thread empties their slots:
//
//   caller's stream                                       | attend
//   side stream       append -> pages, slot | append ...  |
#pragma once

#include "lib/attend/call.h"

namespace tandem {

class ChunkRows {
 public:
  explicit ChunkRows(SessionCore& core) : core_(core) {}

  // Pins the extents of the call's new rows. Sets call.taken.prefill.copies_rows if copies can bring the rows there. The
  // cache's mutex is held exclusively.
  void choose_way(Call& call);
  // Returns the number of tasks of a chunk of n_tokens. The last one is the chunk's own.
  static int64_t n_tasks(const PrefillSize& size, int64_t n_tokens);
  // Fills the chunk's tasks. The cache's mutex is held exclusively.
  void prepare(Call& chunk);
  // Writes descriptors of the tickets that bring rows, after the chunk's descriptor. Returns how many.
  static int64_t describe_tickets(const Call& chunk, const DeviceSequence& of_chunk, DeviceSequence* tickets);
  // Launches the append and posts the tasks. append: the whole chunk, with its descriptor. tickets: their descriptors, in
  // device memory. Work that is launched on the caller's stream afterwards finds the rows in their pages.
  Status send(const Call& chunk, const DeviceAppend& append, const DeviceSequence* tickets);

 private:
  Status copy(const Call& chunk, const DeviceAppend& append);
  Status post_empty(const Call& chunk, const DeviceAppend& append) const;
  Status send_by_tickets(const Call& chunk, const DeviceAppend& append, const DeviceSequence* tickets) const;

  SessionCore& core_;
  CopyList copies_;                            // of the prepared chunk
  int64_t buffers_at_ = 0, buffer_bytes_ = 0;  // of the previous chunk
};

}  // namespace tandem
