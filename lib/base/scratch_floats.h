// SPDX-License-Identifier: MIT
// Work space of one call, which may be gigabytes.
//
// Nothing is cleared and nothing is copied when it grows: either would keep a cancelled call from ending for a tenth of a
// second per gigabyte. The C library grows large blocks by moving their pages (mremap), so no page is given back either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace tandem {

class ScratchFloats {
 public:
  // Room for n floats, which hold anything. Throws std::bad_alloc; then the room is what it was.
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

// Floats whose rows are laid out before there is room for them: take() gives indices, and floats.reserve(n_floats) comes
// last.
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
