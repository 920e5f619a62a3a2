// SPDX-License-Identifier: MIT
// Two or more buffers that a session's keys pass through, and the stream that fills them. One buffer is filled while another
// is attended. Calls do not wait: events say when a buffer is full and when it may be filled again.
//
//   copy stream     fill 0 | fill 1 |        fill 0 |        fill 1 ...
//   caller's                 attend 0 | attend 1 |  attend 0 | ...
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lib/base/memory.h"
#include "lib/machine/device_owner.h"

namespace tandem {

class StreamBuffers {
 public:
  static constexpr int64_t kBuffers = 2;  // for streamed keys

  static Status create(const Device& device, Tier& tier, int64_t buffer_bytes, int64_t n_buffers,
                       std::unique_ptr<StreamBuffers>* buffers);
  ~StreamBuffers();
  StreamBuffers(const StreamBuffers&) = delete;

  // Pieces are sent and taken in the same order. next() is the buffer of the next piece.
  std::byte* next() const { return at(n_sent_); }
  Status send(const std::vector<StridedCopy>& copies);
  // take(): later work on `stream` waits for the oldest piece that was sent. done_with(): work so far on `stream` was the
  // last to use that piece.
  Status take(void* stream, std::byte** piece);
  Status done_with(void* stream);
  // Like done_with(), for a caller that records the event itself, behind its last use of the piece.
  void* done_event() const { return freed_[place(n_taken_)]; }
  void done_by_event() { ++n_taken_; }
  // Sets *flag to 1 behind all copies so far. flag: a device address.
  Status mark(std::byte* flag);
  // After a failure: waits until no work is in flight in the buffers.
  void settle(void* stream);

 private:
  StreamBuffers(const Device& device, int64_t buffer_bytes) : device_(device), buffer_bytes_(buffer_bytes) {}
  size_t place(uint64_t n) const { return static_cast<size_t>(n % filled_.size()); }
  std::byte* at(uint64_t n) const { return memory_.data() + static_cast<int64_t>(place(n)) * buffer_bytes_; }

  const Device& device_;
  int64_t buffer_bytes_;
  Buffer memory_;
  void* stream_ = nullptr;
  bool has_stream_ = false;
  std::vector<void*> filled_, freed_;  // events, [n_buffers]
  uint64_t n_sent_ = 0, n_taken_ = 0;
};

}  // namespace tandem
