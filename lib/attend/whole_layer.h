// SPDX-License-Identifier: MIT
// All keys of a sequence in one layer, in device memory while the chunks of an append attend them. Head patterns choose
// among all keys, but a session's windows may hold only the newest. The keys come from three places:
//
//   host store     -> keys before the window, by the copy engine
//   window's ring  -> whole pages of the ring, by copies within the device
//   new rows       -> by the appends of the chunks, one after the other
//
// A page has the layout of the layer's part of a window's page. Token t is in page t / kDevicePageLen. There are two
// buffers, so copies for a layer may cross the bus while the layer before is attended. If all query heads of a KV head
// attend only sinks and a window, the keys between these stay on the host.
#pragma once

#include <memory>

#include "lib/attend/call.h"
#include "lib/pieces/stream_buffers.h"

namespace tandem {

class WholeLayer {
 public:
  // Makes room for n_tokens tokens of a layer like the call's. Waits for the device if the buffers have to grow.
  Status reserve(const Call& call, int64_t n_tokens);
  // Lists the copies and waits until their rows are in the store. Lists none if an earlier chunk of the same sequence and
  // call has brought the keys. The cache's mutex is held, at least shared.
  void list(const Call& chunk);
  // Launches the copies. Later work on the caller's stream finds all keys before the chunk's own in *pages.
  Status bring(const Call& chunk, std::byte** pages);
  // Called after all work that reads the pages is launched. is_last: the chunk is the sequence's last in the call.
  Status done(const Call& chunk, bool is_last);
  // Waits, after a failure, until no work in the buffers is in flight.
  void settle(void* stream);

 private:
  void list_from_store(const Call& chunk, int32_t kv_head, TokenRange tokens, std::byte* to);

  std::unique_ptr<StreamBuffers> buffers_;
  int64_t buffer_bytes_ = 0;
  std::byte* pages_ = nullptr;  // null while the buffers hold no keys of the call
  CopyList from_store_, from_ring_;
  int64_t n_bytes_ = 0;  // bytes of from_store_
};

}  // namespace tandem
