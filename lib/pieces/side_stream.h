// SPDX-License-Identifier: MIT
// A stream of a session's own, for what may go on beside the caller's stream.
//
//   caller's   what comes before | ... attend ... attend ... |  what comes behind
//   side                         fork()  append, append ...  join()
//
// What the side stream has to send may lie in one of two buffers that take turns. The caller's stream fills a buffer once
// the buffer's earlier contents have been copied; the other buffer may still be copied meanwhile.
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
  Status fork(void* stream);  // what is asked of this one comes behind what `stream` was asked for
  Status join(void* stream);  // and what `stream` is asked for, behind what this one was
  Status join_if_ahead(void* stream) {
    return is_ahead_ ? join(stream) : Status();
  }                   // unless a stream has joined since the last fork()
  void settle();      // nothing is under way here any more
  void wait() const;  // likewise, for a thread that is not the session's

  int turn() const { return turn_; }      // the buffer whose turn it is, 0 or 1
  Status begin_turn(void* stream) const;  // `stream` waits until what was sent from that buffer is there
  Status end_turn();                      // all of that buffer has been asked for here

 private:
  explicit SideStream(const Device& device) : device_(device) {}

  const Device& device_;
  void *stream_ = nullptr, *forked_ = nullptr, *joined_ = nullptr, *sent_[2] = {};
  int turn_ = 0;
  bool has_stream_ = false, is_ahead_ = false;
};

}  // namespace tandem
