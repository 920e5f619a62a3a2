// SPDX-License-Identifier: MIT
// Pins the store's memory for copies to a device, piece by piece.
//
// A piece is the memory of some layers in an extent (StoreGeometry::pieces), 8 MiB or more. A copy moves rows of one layer,
// so it never crosses from one pinned piece to another. A call that is about to stream rows asks for their pieces and uses
// those that are pinned by then. A thread of the engine pins the others. While memory is being pinned, the CUDA driver
// blocks all other calls: 0.3 ms for 8 MiB on an H100's host. So after each piece the thread pauses for twice the time that
// it took. If a caller must wait for a piece, the caller pins the piece itself, at once.
//
// A pinned piece stays pinned as long as its memory exists. A piece that the device has refused is not tried again.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "lib/machine/device_ref.h"
#include "lib/machine/worker.h"

namespace tandem {

class StorePins {
 public:
  struct Piece {
    std::byte* data = nullptr;
    int64_t bytes = 0;
    bool may_be_pinned = true;
  };
  enum class State : uint8_t { kNotAsked, kQueued, kPinning, kPinned, kRefused };

  StorePins(const Device& device, Worker& worker);
  // Waits for the piece that is being pinned, then unpins all pieces.
  ~StorePins();
  StorePins(const StorePins&) = delete;

  // From now on there are n pieces, numbered from 0.
  void grow(size_t n);
  // Returns the piece's state. If it was not asked for before, queues it for the engine's thread.
  State ask(size_t idx, const Piece& piece);
  // Pins the piece now, or waits for the thread that is pinning it.
  bool pin(size_t idx, const Piece& piece);
  // Unpins the piece, as its memory is about to be freed. A refused piece may be asked for again.
  void forget(size_t idx);
  int64_t pinned_bytes() const { return pinned_bytes_.load(std::memory_order_relaxed); }
  // Returns the time that pinning so many bytes takes, by the average of earlier pieces.
  double ns_of(int64_t bytes) const;

 private:
  struct Entry {
    State state = State::kNotAsked;
    Piece piece;
  };
  void pin_next();
  std::chrono::nanoseconds pin_locked(size_t idx, std::unique_lock<std::mutex>* lock);

  const Device& device_;
  Worker& worker_;
  Job job_;
  mutable std::mutex mutex_;  // guards the members below, except pinned_bytes_
  std::condition_variable changed_;
  std::vector<Entry> entries_;
  std::deque<size_t> queue_;  // the caller may already have pinned some of them
  bool stops_ = false;
  int64_t taken_ns_ = 0, ever_pinned_bytes_ = 0;
  std::atomic<int64_t> pinned_bytes_{0};
};

}  // namespace tandem
