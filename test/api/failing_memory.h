// SPDX-License-Identifier: MIT
// Replaces malloc() and mmap() of a program by versions that fail the N-th time while armed, once or from then on. This
// covers the calls of every library of the program: hwloc, oneDNN, libgomp, libstdc++ and libc itself. It does not cover
// memory that libc maps for itself, such as the stacks of threads.
// Include this header in only one file of a program.
#pragma once

#include <execinfo.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
}

namespace failing_memory {

constexpr int kMostFrames = 48;
constexpr int64_t kMostRequests = int64_t{1} << 17;

// Lies in memory that a parent process shares with its child.
struct Plan {
  std::atomic<int64_t> fails_at{0};  // 0: never
  std::atomic<bool> for_ever{false};
  std::atomic<bool> armed{false};
  std::atomic<int64_t> n_requests{0};  // requests made while armed
  std::atomic<int64_t> n_refused{0};
  void* frames[kMostFrames] = {};  // call stack of the most recently refused request
  int n_frames = 0;
  std::atomic<bool> lists{false};                    // records `places` of the requests
  std::atomic<uint64_t> places[kMostRequests] = {};  // for each request, a hash of the call stack
};

inline Plan* plan = nullptr;  // null: no request fails
inline thread_local bool in_backtrace = false;

inline void list_place(int64_t n) {
  if (n > kMostRequests) return;
  void* frames[kMostFrames];
  in_backtrace = true;
  const int n_frames = backtrace(frames, kMostFrames);
  in_backtrace = false;
  uint64_t hash = 0;
  for (int i = 1; i < n_frames; ++i) hash = (hash ^ reinterpret_cast<uint64_t>(frames[i])) * 0x9e3779b97f4a7c15u;
  plan->places[n - 1].store(hash, std::memory_order_relaxed);
}

inline bool refuses() {
  if (plan == nullptr || in_backtrace || !plan->armed.load(std::memory_order_acquire)) return false;
  const int64_t at = plan->fails_at.load(std::memory_order_relaxed), n = plan->n_requests.fetch_add(1) + 1;
  if (plan->lists) list_place(n);
  if (at == 0 || (n != at && !(plan->for_ever.load(std::memory_order_relaxed) && n > at))) return false;
  plan->n_refused.fetch_add(1);
  in_backtrace = true;
  plan->n_frames = backtrace(plan->frames, kMostFrames);
  in_backtrace = false;
  errno = ENOMEM;
  return true;
}

}  // namespace failing_memory

extern "C" {
[[gnu::noinline]] void* malloc(size_t n) { return failing_memory::refuses() ? nullptr : __libc_malloc(n); }
[[gnu::noinline]] void* calloc(size_t n, size_t size) {
  return failing_memory::refuses() ? nullptr : __libc_calloc(n, size);
}
[[gnu::noinline]] void* realloc(void* p, size_t n) { return failing_memory::refuses() ? nullptr : __libc_realloc(p, n); }
[[gnu::noinline]] void* memalign(size_t a, size_t n) { return failing_memory::refuses() ? nullptr : __libc_memalign(a, n); }
[[gnu::noinline]] void* aligned_alloc(size_t a, size_t n) {
  return failing_memory::refuses() ? nullptr : __libc_memalign(a, n);
}
[[gnu::noinline]] int posix_memalign(void** p, size_t a, size_t n) {
  void* const data = failing_memory::refuses() ? nullptr : __libc_memalign(a, n);
  if (data == nullptr) return ENOMEM;
  *p = data;
  return 0;
}
[[gnu::noinline]] void* mmap(void* at, size_t n, int protection, int flags, int file, off_t offset) noexcept {
  if (failing_memory::refuses()) return MAP_FAILED;
  return reinterpret_cast<void*>(syscall(SYS_mmap, at, n, protection, flags, file, offset));
}
}
