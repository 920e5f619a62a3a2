// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::cuda {

// Lays out a work space: the address of each area, and the bytes of all.
class RoomPlan {
 public:
  explicit RoomPlan(void* data) : data_(static_cast<std::byte*>(data)) {}
  template <class T>
  T* take(int64_t n) {
    T* const at = reinterpret_cast<T*>(data_ + bytes_);
    bytes_ += (n * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 256;
  std::byte* data_;
  int64_t bytes_ = 0;
};

}  // namespace tandem::cuda
