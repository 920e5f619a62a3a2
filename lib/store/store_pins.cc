// SPDX-License-Identifier: MIT
#include "lib/store/store_pins.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "lib/base/process_end.h"

namespace tandem {

StorePins::StorePins(const Device& device, Worker& worker) : device_(device), worker_(worker) {
  job_.run = [](void* self) { static_cast<StorePins*>(self)->pin_next(); };
  job_.context = this;
}

StorePins::~StorePins() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    queue_.clear();
  }
  changed_.notify_all();
  worker_.cancel(job_);
  for (const Entry& entry : entries_)
    if (entry.state == State::kPinned && !process_ends()) device_.table->unpin(device_.self, entry.piece.data);
}

void StorePins::grow(size_t n) {
  const std::lock_guard lock(mutex_);
  if (n > entries_.size()) entries_.resize(n);
}

StorePins::State StorePins::ask(size_t idx, const Piece& piece) {
  {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[idx];
    if (entry.state != State::kNotAsked) return entry.state;
    entry.piece = piece;
    if (!piece.may_be_pinned) return entry.state = State::kRefused;
    queue_.push_back(idx);
    entry.state = State::kQueued;
  }
  worker_.post(job_);
  return State::kQueued;
}

bool StorePins::pin(size_t idx, const Piece& piece) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return entries_[idx].state != State::kPinning; });
  Entry& entry = entries_[idx];
  if (entry.state == State::kNotAsked) entry.piece = piece;
  if (!piece.may_be_pinned) entry.state = State::kRefused;
  if (entry.state == State::kNotAsked || entry.state == State::kQueued) pin_locked(idx, &lock);
  return entries_[idx].state == State::kPinned;
}

void StorePins::forget(size_t idx) {
  std::unique_lock lock(mutex_);
  if (idx >= entries_.size()) return;
  changed_.wait(lock, [&] { return entries_[idx].state != State::kPinning; });
  const Entry entry = std::exchange(entries_[idx], {});  // pin_next() skips entries that are not queued any more
  if (entry.state != State::kPinned) return;
  pinned_bytes_.fetch_sub(entry.piece.bytes, std::memory_order_relaxed);
  if (!process_ends()) device_.table->unpin(device_.self, entry.piece.data);
}

double StorePins::ns_of(int64_t bytes) const {
  constexpr double kAssumedNs = 0.04;  // for a byte, on an H100's host
  const std::lock_guard lock(mutex_);
  const auto pinned = static_cast<double>(ever_pinned_bytes_);
  return static_cast<double>(bytes) * (pinned > 0.0 ? static_cast<double>(taken_ns_) / pinned : kAssumedNs);
}

// Holds the lock before and after, but not during the device's call. Other threads may add entries meanwhile.
std::chrono::nanoseconds StorePins::pin_locked(size_t idx, std::unique_lock<std::mutex>* lock) {
  using Clock = std::chrono::steady_clock;
  entries_[idx].state = State::kPinning;
  const Piece piece = entries_[idx].piece;
  lock->unlock();
  const auto begin = Clock::now();
  DeviceError error;
  const bool is_pinned = device_.table->pin(device_.self, piece.data, piece.bytes, &error) == TANDEM_OK;
  const auto taken = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin);
  lock->lock();
  entries_[idx].state = is_pinned ? State::kPinned : State::kRefused;
  if (is_pinned) {
    taken_ns_ += taken.count();
    ever_pinned_bytes_ += piece.bytes;
    pinned_bytes_.fetch_add(piece.bytes, std::memory_order_relaxed);
  }
  changed_.notify_all();
  return taken;
}

// Pins one piece. Other jobs of the thread, such as those of other caches, run before the next piece.
void StorePins::pin_next() {
  constexpr int kPause = 2;  // pause after a piece, in times of its duration
  const AtWork at_work;
  if (!at_work.may_begin()) return;
  std::unique_lock lock(mutex_);
  while (!queue_.empty() && entries_[queue_.front()].state != State::kQueued) queue_.pop_front();
  if (queue_.empty()) return;
  const size_t idx = queue_.front();
  queue_.pop_front();
  const auto taken = pin_locked(idx, &lock);
  changed_.wait_for(lock, kPause * taken, [this] { return stops_; });
  if (stops_ || queue_.empty()) return;
  lock.unlock();
  worker_.post(job_);
}

}  // namespace tandem
