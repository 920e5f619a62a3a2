// SPDX-License-Identifier: MIT
// A session's own stream, for work beside the caller's stream.
//
//   caller's   earlier work     | ... attend ... attend ... |  later work
//   side                         fork()  append, append ...  join()
//
// Data for the side stream lies in one of two buffers that take turns. The caller's stream fills a buffer once the buffer's
// earlier contents have been copied. The other buffer may still be copied meanwhile.
#pragma once

#include <memory>

#include "lib/machine/device_owner.h"

namespace tandem {

class SideStream {
 public:
  static Status create(const Device& device, std::unique_ptr<SideStream>* stream);
  ~SideStream();
  SideStream(const SideStream&) = delete;

  void* get() const { return stream_; }
  Status fork(void* stream);  // later work here waits for earlier work on `stream`
  Status join(void* stream);  // later work on `stream` waits for earlier work here
  Status join_if_ahead(void* stream) {
    return is_ahead_ ? join(stream) : Status();
  }                   // does nothing if a stream has joined since the last fork()
  void settle();      // waits until no work is in flight here
  void wait() const;  // likewise, for a thread other than the session's

  int turn() const { return turn_; }      // the buffer to use next, 0 or 1
  Status begin_turn(void* stream) const;  // `stream` waits until that buffer's earlier contents have been copied
  Status end_turn();                      // all copies from that buffer have been queued here

 private:
  explicit SideStream(const Device& device) : device_(device) {}

  const Device& device_;
  void *stream_ = nullptr, *forked_ = nullptr, *joined_ = nullptr, *sent_[2] = {};
  int turn_ = 0;
  bool has_stream_ = false, is_ahead_ = false;
};

}  // namespace tandem
