// SPDX-License-Identifier: MIT
// Allocation functions of the stand-in alone. A device's memory is not its program's: a program that replaces operator new
// and lets it fail (test/failing_new.h) must not meet the stand-in's allocations. stand_in.map keeps these names inside the
// module.
#include <cstdlib>
#include <new>

void* operator new(size_t n) {
  void* data = std::malloc(n == 0 ? 1 : n);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
// std::stable_sort allocates with this function and frees with the next one.
void* operator new(size_t n, const std::nothrow_t&) noexcept { return std::malloc(n == 0 ? 1 : n); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
