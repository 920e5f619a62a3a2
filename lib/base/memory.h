// SPDX-License-Identifier: MIT
// Host memory of caches and sessions. Every byte is counted against the cap of its tier before it is allocated.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "lib/base/status.h"

namespace tandem {

inline constexpr int64_t kPageBytes = 4096, kHugePageBytes = int64_t{1} << 21;

struct Allocator {
  tandem_alloc_fn alloc = nullptr;  // null: private mappings, with huge pages where they fit
  tandem_free_fn free = nullptr;
  void* user = nullptr;
  // Used instead of alloc. Returns an error that says why an allocation failed.
  Status (*take)(int64_t bytes, void** data, void* user) = nullptr;
};

enum class Use { kKv, kSession, kSelection, kStream, kWeights };
inline constexpr int kUses = 5;

// One tier of one cache. Thread-safe.
class Tier {
 public:
  Tier(const char* cap_field, int64_t cap_bytes, Allocator allocator)
      : cap_field_(cap_field), cap_bytes_(cap_bytes), allocator_(allocator) {}

  int64_t used(Use use) const { return used_[static_cast<int>(use)].load(std::memory_order_relaxed); }
  int64_t total() const { return total_.load(std::memory_order_relaxed); }
  int64_t peak() const { return peak_.load(std::memory_order_relaxed); }
  int64_t cap() const { return cap_bytes_; }
  bool maps() const { return allocator_.free == nullptr; }  // blocks are the tier's own mappings, not the caller's memory

 private:
  friend class Buffer;
  Status take(int64_t bytes, Use use, void** data);
  void give(void* data, int64_t bytes, Use use);

  const char* cap_field_;
  int64_t cap_bytes_;  // 0: no cap
  Allocator allocator_;
  std::atomic<int64_t> used_[kUses] = {};
  std::atomic<int64_t> total_{0};
  std::atomic<int64_t> peak_{0};
};

// Owns a block of a tier. Blocks are 64-byte aligned. The tier's own mappings of 2 MiB or more are aligned to 2 MiB.
// Contents are undefined.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer moved(std::move(other));
    swap(moved);
    return *this;
  }
  ~Buffer();

  static Status create(Tier& tier, int64_t bytes, Use use, Buffer* buffer);
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }
  void swap(Buffer& other) noexcept {
    std::swap(tier_, other.tier_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(use_, other.use_);
  }

 private:
  Tier* tier_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  Use use_ = Use::kKv;
};

}  // namespace tandem
