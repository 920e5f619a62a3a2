// SPDX-License-Identifier: MIT
// Pins the store's memory for copies to a device, piece by piece.
//
// A piece is what some layers have of an extent (StoreGeometry::pieces), 8 MiB and more, so a copy, which moves rows of
// one layer, never crosses from one pinned piece to another. A call that is about to stream rows asks for their pieces and
// goes on with those that are pinned by then; a thread of the engine pins the others. While memory is pinned the CUDA driver
// lets no other call in: 0.3 ms for 8 MiB on an H100's host. So the thread pauses after each piece for twice as long as that
// took. A piece that a caller waits for is pinned by the caller, at once.
//
// What is pinned stays pinned as long as its memory is there. What the device has refused is not asked for again.
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
  // Waits for the piece that is being pinned, and unpins all.
  ~StorePins();
  StorePins(const StorePins&) = delete;

  // There are n pieces from now on, numbered from 0.
  void grow(size_t n);
  // Whether it is pinned, or refused. Else the engine's thread pins it, soon.
  State ask(size_t idx, const Piece& piece);
  // Pins it now, or waits for the thread that does.
  bool pin(size_t idx, const Piece& piece);
  // The piece's memory is about to go: unpins it. What has been refused may be asked for again.
  void forget(size_t idx);
  int64_t pinned_bytes() const { return pinned_bytes_.load(std::memory_order_relaxed); }
  // How long that many bytes take to be pinned, as others did.
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
  mutable std::mutex mutex_;  // guards what follows, but for pinned_bytes_
  std::condition_variable changed_;
  std::vector<Entry> entries_;
  std::deque<size_t> queue_;  // some may have been pinned meanwhile
  bool stops_ = false;
  int64_t taken_ns_ = 0, ever_pinned_bytes_ = 0;
  std::atomic<int64_t> pinned_bytes_{0};
};

}  // namespace tandem
