// SPDX-License-Identifier: MIT
// Work space of one call, up to gigabytes.
//
// Growing clears nothing and copies nothing. Either would delay the end of a cancelled call by a tenth of a second per
// gigabyte. The C library grows large blocks by moving their pages (mremap), so no page is freed either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace tandem {

class ScratchFloats {
 public:
  // Makes room for n floats with undefined contents. Throws std::bad_alloc and then keeps the old room.
  void reserve(size_t n) {
    if (n <= capacity_) return;
    if (n > SIZE_MAX / sizeof(float)) throw std::bad_alloc();
    void* data = std::realloc(data_.get(), n * sizeof(float));
    if (data == nullptr) throw std::bad_alloc();
    (void)data_.release();
    data_.reset(static_cast<float*>(data));
    capacity_ = n;
  }
  float* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
  size_t capacity_ = 0;
};

// Rows of floats that are laid out before their memory is allocated: take() returns indices, and floats.reserve(n_floats) is
// called last.
struct FloatRows {
  ScratchFloats floats;
  size_t n_floats = 0;

  size_t take(int64_t n) {
    const size_t at = n_floats;
    n_floats += (static_cast<size_t>(n) + 15) / 16 * 16;  // rows start on a cache line
    return at;
  }
  float* at(size_t index) { return floats.data() + index; }
};

}  // namespace tandem
