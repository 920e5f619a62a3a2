// SPDX-License-Identifier: MIT
#include "lib/base/memory.h"

#include <sys/mman.h>

#include <cerrno>

namespace tandem {
namespace {

int64_t mapping_bytes(int64_t bytes) {
  const int64_t unit = bytes >= kHugePageBytes ? kHugePageBytes : kPageBytes;
  return (bytes + unit - 1) / unit * unit;
}

// Anonymous mappings are 4-KiB aligned. From 2 MiB on, the start is moved to a huge-page boundary and the slack is unmapped.
// So the kernel can back the whole block with huge pages.
void* map(int64_t bytes) {
  const int64_t size = mapping_bytes(bytes);
  const int64_t slack = size >= kHugePageBytes ? kHugePageBytes : 0;
  void* mapped = mmap(nullptr, static_cast<size_t>(size + slack), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  if (slack == 0) return mapped;
  auto* start = static_cast<std::byte*>(mapped);
  const int64_t before = (kHugePageBytes - reinterpret_cast<intptr_t>(start) % kHugePageBytes) % kHugePageBytes;
  if (before > 0) munmap(start, static_cast<size_t>(before));
  if (slack > before) munmap(start + before + size, static_cast<size_t>(slack - before));
  madvise(start + before, static_cast<size_t>(size), MADV_HUGEPAGE);
  return start + before;
}

}  // namespace

Status Tier::take(int64_t bytes, Use use, void** data) {
  // A request that does not fit is never counted. Counting it could make a fitting request of another thread fail.
  int64_t before = total_.load(std::memory_order_relaxed);
  do {
    if (cap_bytes_ > 0 && before + bytes > cap_bytes_)
      return fail(TANDEM_ERROR_CAPACITY, cap_field_, "%s = %lld: %lld bytes are in use and %lld more are needed", cap_field_,
                  static_cast<long long>(cap_bytes_), static_cast<long long>(before), static_cast<long long>(bytes));
  } while (!total_.compare_exchange_weak(before, before + bytes, std::memory_order_relaxed));
  struct Counted {  // undoes the count unless the block is allocated
    std::atomic<int64_t>* total;
    int64_t bytes;
    ~Counted() { total->fetch_sub(bytes, std::memory_order_relaxed); }
  } counted{&total_, bytes};
  const int64_t total = before + bytes;
  constexpr size_t kAlignment = 64;
  if (allocator_.take != nullptr)
    TANDEM_TRY(allocator_.take(bytes, data, allocator_.user));
  else
    *data = maps() ? map(bytes) : allocator_.alloc(static_cast<size_t>(bytes), kAlignment, allocator_.user);
  if (*data == nullptr)
    return fail_system(TANDEM_ERROR_OUT_OF_MEMORY, maps() ? errno : 0, "", "no memory for %lld bytes",
                       static_cast<long long>(bytes));
  if (reinterpret_cast<uintptr_t>(*data) % kAlignment != 0) {
    void* misaligned = std::exchange(*data, nullptr);
    allocator_.free(misaligned, static_cast<size_t>(bytes), allocator_.user);
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "alloc", "alloc returned %p, which is not aligned to %zu bytes", misaligned,
                kAlignment);
  }
  counted.bytes = 0;
  used_[static_cast<int>(use)].fetch_add(bytes, std::memory_order_relaxed);
  int64_t peak = peak_.load(std::memory_order_relaxed);
  while (peak < total && !peak_.compare_exchange_weak(peak, total, std::memory_order_relaxed)) {
  }
  return {};
}

void Tier::give(void* data, int64_t bytes, Use use) {
  if (maps())
    munmap(data, static_cast<size_t>(mapping_bytes(bytes)));
  else
    allocator_.free(data, static_cast<size_t>(bytes), allocator_.user);
  used_[static_cast<int>(use)].fetch_sub(bytes, std::memory_order_relaxed);
  total_.fetch_sub(bytes, std::memory_order_relaxed);
}

Buffer::~Buffer() {
  if (data_ != nullptr) tier_->give(data_, bytes_, use_);
}

Status Buffer::create(Tier& tier, int64_t bytes, Use use, Buffer* buffer) {
  Buffer made;
  TANDEM_TRY(tier.take(bytes, use, &made.data_));
  made.tier_ = &tier;
  made.bytes_ = bytes;
  made.use_ = use;
  buffer->swap(made);
  return {};
}

}  // namespace tandem
