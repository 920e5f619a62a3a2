// SPDX-License-Identifier: MIT
// Pointers that callers pass: the one place where they are looked at before they are used.
//
// A pointer is aligned to the type that its parameter or member points to. Others are refused: to read or write through them
// is undefined, and on some processors a fault.
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

// Aligned, or NULL.
template <typename T>
Status require_aligned(const T* pointer, const char* parameter) {
  if constexpr (std::is_void_v<T>)
    return {};
  else
    return require_aligned(pointer, alignof(T), parameter);
}

// Aligned, and not NULL.
template <typename T>
Status require(const T* pointer, const char* parameter) {
  return pointer == nullptr ? refuse_null(parameter) : require_aligned(pointer, parameter);
}

}  // namespace tandem
