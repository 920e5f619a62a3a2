// SPDX-License-Identifier: MIT
// Checks the pointers that callers pass. Every such pointer is checked here before it is used.
//
// A pointer must be aligned for the type that its parameter or member points to. A misaligned pointer is refused: access
// through it is undefined, and faults on some processors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lib/base/status.h"

namespace tandem {

Status refuse_null(const char* parameter);
Status refuse_misaligned(const void* pointer, size_t alignment, const char* parameter);

inline Status require_aligned(const void* pointer, size_t alignment, const char* parameter) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignment == 0) return {};
  return refuse_misaligned(pointer, alignment, parameter);
}

// Accepts NULL and aligned pointers.
template <typename T>
Status require_aligned(const T* pointer, const char* parameter) {
  if constexpr (std::is_void_v<T>)
    return {};
  else
    return require_aligned(pointer, alignof(T), parameter);
}

// Accepts aligned pointers, but not NULL.
template <typename T>
Status require(const T* pointer, const char* parameter) {
  return pointer == nullptr ? refuse_null(parameter) : require_aligned(pointer, parameter);
}

}  // namespace tandem
