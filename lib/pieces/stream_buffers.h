// SPDX-License-Identifier: MIT
// The buffers, two or more, that a session's keys go through, and the stream that fills them: one is filled while another
// is attended. Calls follow each other without waiting; events say when a buffer is full, and when it may be filled again.
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
  static constexpr int64_t kBuffers = 2;  // of streamed keys

  static Status create(const Device& device, Tier& tier, int64_t buffer_bytes, int64_t n_buffers,
                       std::unique_ptr<StreamBuffers>* buffers);
  ~StreamBuffers();
  StreamBuffers(const StreamBuffers&) = delete;

  // Pieces are sent and taken in one order. next(): where the next one goes.
  std::byte* next() const { return at(n_sent_); }
  Status send(const std::vector<StridedCopy>& copies);
  // The oldest that was sent is there, for what follows on `stream`; done_with() what was asked of it until then.
  Status take(void* stream, std::byte** piece);
  Status done_with(void* stream);
  // The same for who records the event: what it was recorded behind has been done with the piece.
  void* done_event() const { return freed_[place(n_taken_)]; }
  void done_by_event() { ++n_taken_; }
  // Behind everything that was sent: *flag is 1. flag: the device's address.
  Status mark(std::byte* flag);
  // After a failure: nothing is under way in the buffers any more.
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
