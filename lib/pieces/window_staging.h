// SPDX-License-Identifier: MIT
// Pinned buffers between the store and the windows. The CPU's pool writes rows to a buffer in the layout of window pages.
// The copy engine copies whole pages from there while the pool writes to the other buffer:
//
//   pool          write 0 | write 1 | write 0 ...
//   copies                 0         | 1       | 0 ...
//
// So rows cross the bus as fast as the pool copies them, whether the store is pinned or not. Direct copies from an unpinned
// store, in runs of 128 rows from many places, reach a tenth of the bus's rate.
//
// Each buffer has its own stream, so waiting for a stream means that its buffer is free.
#pragma once

#include <cstdint>
#include <memory>

#include "lib/base/memory.h"
#include "lib/machine/device_owner.h"
#include "lib/pieces/device_window.h"
#include "lib/pieces/stream_pieces.h"

namespace tandem {

// Bytes of a buffer, which one call of the pool fills. Tests make it smaller.
inline constinit int64_t staged_at_once = int64_t{16} << 20;

class WindowStaging {
 public:
  static constexpr int kBuffers = 2;
  // Bytes of both buffers. Each has room for a page of any layer.
  static int64_t bytes_of(const WindowGeometry& geometry);
  static Status create(const Device& device, const Backend& cpu, const WindowGeometry& geometry,
                       std::unique_ptr<WindowStaging>* staging);
  ~WindowStaging();
  WindowStaging(const WindowStaging&) = delete;

  int64_t buffer_bytes() const { return buffer_bytes_; }
  // Later copies wait for earlier work on `stream`.
  Status fork(void* stream);
  // Waits until the next buffer may be written and returns it.
  Status next(std::byte** buffer);
  // Queues copies from that buffer.
  Status send(const CopyList& copies);
  // Later work on `stream` waits for the copies so far.
  Status join(void* stream);
  // After a failure: waits until no work is in flight.
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
  // The library's own memory, pinned afterwards. It is ready in a third of the time that the device takes to allocate pinned
  // memory.
  Tier tier_{"", 0, Allocator()};
  Buffer own_;
  bool is_pinned_ = false;
  void *shared_ = nullptr, *forked_ = nullptr;  // shared_: memory allocated by the device, used if pinning is refused
  Lane lanes_[kBuffers];
  int next_ = 0;
};

}  // namespace tandem
