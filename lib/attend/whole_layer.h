// SPDX-License-Identifier: MIT
// All keys of a sequence in one layer, in device memory while the chunks of an append attend them. Head patterns choose
// among all keys, and a session's windows may have the newest ones alone:
//
//   host store     -> keys before the window, by the copy engine
//   window's ring  -> whole pages that the ring has, within the device
//   new rows       -> by the chunks' appends, each after the one before it
//
// A page has the layout of the layer's part of a window's page, and token t is in page t / kDevicePageLen. There are two
// buffers: the copies for a layer may cross the bus while the layer before is attended. Where a KV head's query heads attend
// sinks and a window alone, the keys between these stay on the host.
#pragma once

#include <memory>

#include "lib/attend/call.h"
#include "lib/pieces/stream_buffers.h"

namespace tandem {

class WholeLayer {
 public:
  // Makes room for n_tokens tokens of any layer of the call's size. Waits for the device where there was less.
  Status reserve(const Call& call, int64_t n_tokens);
  // The cache's mutex is held, at least shared. Waits until the rows that are to come are in the store, and lists the
  // copies; none where the chunk follows one of the same sequence in the same call.
  void list(const Call& chunk);
  // What is asked of the caller's stream then finds all keys before the chunk's own in *pages.
  Status bring(const Call& chunk, std::byte** pages);
  // Everything that reads the pages has been asked for. is_last: no other chunk of the sequence follows in the call.
  Status done(const Call& chunk, bool is_last);
  // After a failure: nothing is under way in the buffers any more.
  void settle(void* stream);

 private:
  void list_from_store(const Call& chunk, int32_t kv_head, TokenRange tokens, std::byte* to);

  std::unique_ptr<StreamBuffers> buffers_;
  int64_t buffer_bytes_ = 0;
  std::byte* pages_ = nullptr;  // null where the buffers have nothing of the call
  CopyList from_store_, from_ring_;
  int64_t n_bytes_ = 0;  // that from_store_ brings
};

}  // namespace tandem
