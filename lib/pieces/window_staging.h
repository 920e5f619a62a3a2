// SPDX-License-Identifier: MIT
// Pinned buffers that rows of the store go through on their way to windows. The CPU's pool writes them to a buffer as the
// window's pages have them, and the copy engine brings whole pages from there, while the pool writes to the other one:
//
//   pool          write 0 | write 1 | write 0 ...
//   copies                 0         | 1       | 0 ...
//
// So rows cross the bus as fast as the pool copies them, whether the store is pinned or not. Copies from a store that is not
// pinned, runs of 128 rows from many places, come at a tenth of the bus's rate.
//
// Each buffer has a stream, so that waiting for one says that its buffer is free.
#pragma once

#include <cstdint>
#include <memory>

#include "lib/base/memory.h"
#include "lib/machine/device_owner.h"
#include "lib/pieces/device_window.h"
#include "lib/pieces/stream_pieces.h"

namespace tandem {

// Bytes of a buffer: a call of the pool copies as much. Tests make it less.
inline constinit int64_t staged_at_once = int64_t{16} << 20;

class WindowStaging {
 public:
  static constexpr int kBuffers = 2;
  // Of both: each has room for a page of any layer.
  static int64_t bytes_of(const WindowGeometry& geometry);
  static Status create(const Device& device, const Backend& cpu, const WindowGeometry& geometry,
                       std::unique_ptr<WindowStaging>* staging);
  ~WindowStaging();
  WindowStaging(const WindowStaging&) = delete;

  int64_t buffer_bytes() const { return buffer_bytes_; }
  // What is sent comes behind what `stream` was asked for.
  Status fork(void* stream);
  // Waits until the next buffer may be written to.
  Status next(std::byte** buffer);
  // Copies from that buffer.
  Status send(const CopyList& copies);
  // What `stream` is asked for comes behind what was sent.
  Status join(void* stream);
  // After a failure: nothing is under way any more.
  void settle();

 private:
  WindowStaging(const Device& device, int64_t buffer_bytes) : device_(device), buffer_bytes_(buffer_bytes) {}
  Status allocate(const Backend& cpu);

  struct Lane {
    void *stream = nullptr, *joined = nullptr;
    bool has_stream = false;
  };
  const Device& device_;
  int64_t buffer_bytes_;
  // Memory of our own that is pinned: it is there in a third of the time that the device takes for memory of its own.
  Tier tier_{"", 0, Allocator()};
  Buffer own_;
  bool is_pinned_ = false;
  void *shared_ = nullptr, *forked_ = nullptr;  // shared_: where that is refused
  Lane lanes_[kBuffers];
  int next_ = 0;
};

}  // namespace tandem
