// SPDX-License-Identifier: MIT
// Replaces operator new of a program by a version that fails the N-th time while armed, on any thread, once or from then
// on. Include it in only one file of a program. The program must link the library's objects, otherwise the library's own
// allocations are not counted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace failing_new {

inline std::atomic<bool> armed{false};
inline std::atomic<bool> for_ever{false};
inline std::atomic<int64_t> n_news{0};    // allocations while armed
inline std::atomic<int64_t> fails_at{0};  // 0: never
inline bool (*is_watched)() = nullptr;    // returns whether the calling thread's allocations count; null: all threads' do

inline bool refuses() {
  if (!armed.load(std::memory_order_acquire) || (is_watched != nullptr && !is_watched())) return false;
  const int64_t at = fails_at.load(std::memory_order_relaxed), n = n_news.fetch_add(1) + 1;
  return at > 0 && (n == at || (for_ever.load(std::memory_order_relaxed) && n > at));
}

inline void* allocate(size_t bytes, size_t alignment) {
  if (refuses()) return nullptr;
  if (alignment <= alignof(max_align_t)) return std::malloc(bytes == 0 ? 1 : bytes);
  return std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
}

inline void* allocate_or_throw(size_t bytes, size_t alignment) {
  void* data = allocate(bytes, alignment);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace failing_new

// oneDNN leaks part of a primitive when it is refused memory for the rest. Only programs that refuse no memory report such
// leaks.
#if defined(__SANITIZE_ADDRESS__)
extern "C" const char* __lsan_default_suppressions() { return "leak:libdnnl\n"; }
#endif

// Not inlined, because compilers warn about a free() that they see at the end of a delete.
#define NOT_INLINED [[gnu::noinline]]

NOT_INLINED void* operator new(size_t n) { return failing_new::allocate_or_throw(n, 1); }
NOT_INLINED void* operator new[](size_t n) { return failing_new::allocate_or_throw(n, 1); }
NOT_INLINED void* operator new(size_t n, std::align_val_t a) {
  return failing_new::allocate_or_throw(n, static_cast<size_t>(a));
}
NOT_INLINED void* operator new[](size_t n, std::align_val_t a) {
  return failing_new::allocate_or_throw(n, static_cast<size_t>(a));
}
NOT_INLINED void* operator new(size_t n, const std::nothrow_t&) noexcept { return failing_new::allocate(n, 1); }
NOT_INLINED void* operator new[](size_t n, const std::nothrow_t&) noexcept { return failing_new::allocate(n, 1); }
NOT_INLINED void* operator new(size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return failing_new::allocate(n, static_cast<size_t>(a));
}
NOT_INLINED void* operator new[](size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return failing_new::allocate(n, static_cast<size_t>(a));
}
NOT_INLINED void operator delete(void* p) noexcept { std::free(p); }
NOT_INLINED void operator delete[](void* p) noexcept { std::free(p); }
NOT_INLINED void operator delete(void* p, size_t) noexcept { std::free(p); }
NOT_INLINED void operator delete[](void* p, size_t) noexcept { std::free(p); }
NOT_INLINED void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
NOT_INLINED void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
NOT_INLINED void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
NOT_INLINED void operator delete[](void* p, size_t, std::align_val_t) noexcept { std::free(p); }

#undef NOT_INLINED
