// SPDX-License-Identifier: MIT
#include "lib/base/process_end.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>

#include "lib/base/handle.h"

namespace tandem {
namespace {

// These variables have no destructors, as they are read until the process is gone. A thread that begins to work counts
// itself, then checks whether the process ends. The handler first sets `ends`, then reads the count. Both are sequentially
// consistent.
constinit std::atomic<bool> ends{false};
constinit std::atomic<int64_t> n_at_work{0};
constinit std::atomic<bool> is_watched{false};
constinit thread_local int64_t n_of_this_thread = 0;  // 1 if a callback of the caller's ends the process

void end() {
  if (is_forked_child()) return;
  ends.store(true);
  const auto latest = std::chrono::steady_clock::now() + kMostAtExit;
  while (n_at_work.load() > n_of_this_thread && std::chrono::steady_clock::now() < latest)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

}  // namespace

void watch_exit() {
  if (is_watched.exchange(true)) return;
  if (std::atexit(end) == 0) return;
  is_watched.store(false);
  throw std::bad_alloc();
}

bool process_ends() noexcept { return ends.load(std::memory_order_relaxed); }

void leave_behind(void* object) noexcept {
  struct Left {
    void* object;
    Left* next;
  };
  static constinit std::atomic<Left*> newest{nullptr};
  Left* left = new (std::nothrow) Left{object, newest.load()};
  while (left != nullptr && !newest.compare_exchange_weak(left->next, left)) {
  }
}

AtWork::AtWork() noexcept {
  n_at_work.fetch_add(1);
  ++n_of_this_thread;
  may_begin_ = !ends.load();
}

AtWork::~AtWork() {
  --n_of_this_thread;
  n_at_work.fetch_sub(1);
}

}  // namespace tandem
