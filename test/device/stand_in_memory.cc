// SPDX-License-Identifier: MIT
#include "device/stand_in_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace stand_in {
namespace {

constexpr int64_t kAlignment = 256, kSharedAlignment = 256;
// ThreadSanitizer knows memory by its address. With it both sides use one address, so that it sees what passes between them.
#ifdef __SANITIZE_THREAD__
constexpr bool kMapsTwice = false;
#else
constexpr bool kMapsTwice = true;
#endif

struct Block {
  int64_t bytes = 0;
  bool is_device = false;
  void* twin = nullptr;  // of shared memory: its address on the other side
};

struct Blocks {
  std::mutex mutex;
  std::map<uintptr_t, Block> by_address;

  const Block* find(const void* data, int64_t bytes) const {
    const auto address = reinterpret_cast<uintptr_t>(data);
    auto found = by_address.upper_bound(address);
    if (found == by_address.begin()) return nullptr;
    --found;
    const auto before = static_cast<int64_t>(address - found->first);
    return before < found->second.bytes && bytes <= found->second.bytes - before ? &found->second : nullptr;
  }
};

Blocks& blocks() {
  // Never destroyed, as in a driver: released sessions may still end while the program ends.
  static Blocks& all = *new Blocks;
  return all;
}

int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

uintptr_t address_of(const void* data) { return reinterpret_cast<uintptr_t>(data); }

void* map(int file, int64_t bytes) {
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return data != MAP_FAILED ? data : nullptr;
}

void unmap(void* data, int64_t bytes) {
  if (data != nullptr) munmap(data, static_cast<size_t>(bytes));
}

}  // namespace

void* allocate_memory(int64_t bytes) {
  if (bytes <= 0) return nullptr;
  const auto whole = static_cast<size_t>(round_up(bytes, kAlignment));
  void* data = std::aligned_alloc(kAlignment, whole);
  if (data == nullptr) return nullptr;
  std::memset(data, 0xff, whole);
  const std::lock_guard lock(blocks().mutex);
  blocks().by_address[address_of(data)] = {bytes, true, nullptr};
  return data;
}

bool release_memory(void* data) {
  const std::lock_guard lock(blocks().mutex);
  const auto found = blocks().by_address.find(address_of(data));
  if (found == blocks().by_address.end() || found->second.twin != nullptr) return false;
  blocks().by_address.erase(found);
  std::free(data);
  return true;
}

bool share_memory(int64_t bytes, void** host, void** device) {
  if (bytes <= 0) return false;
  const int64_t whole = round_up(bytes, kSharedAlignment);
  const int file = memfd_create("stand-in", MFD_CLOEXEC);
  if (file < 0) return false;
  const bool is_there = ftruncate(file, whole) == 0;
  void* first = is_there ? map(file, whole) : nullptr;
  void* second = !kMapsTwice ? first : first != nullptr ? map(file, whole) : nullptr;
  ::close(file);
  if (second == nullptr) {
    unmap(first, whole);
    return false;
  }
  const std::lock_guard lock(blocks().mutex);
  blocks().by_address[address_of(first)] = {bytes, !kMapsTwice, second};
  if (kMapsTwice) blocks().by_address[address_of(second)] = {bytes, true, first};
  *host = first;
  *device = second;
  return true;
}

bool pin_memory(void* data, int64_t bytes) {
  const std::lock_guard lock(blocks().mutex);
  if (blocks().find(data, 1) != nullptr) return false;
  blocks().by_address[address_of(data)] = {bytes, false, nullptr};
  return true;
}

bool unpin_memory(void* data) {
  const std::lock_guard lock(blocks().mutex);
  const auto found = blocks().by_address.find(address_of(data));
  if (found == blocks().by_address.end() || found->second.is_device || found->second.twin != nullptr) return false;
  blocks().by_address.erase(found);
  return true;
}

bool unshare_memory(void* host) {
  const std::lock_guard lock(blocks().mutex);
  const auto found = blocks().by_address.find(address_of(host));
  if (found == blocks().by_address.end() || found->second.twin == nullptr || found->second.is_device == kMapsTwice)
    return false;
  void* device = found->second.twin;
  const int64_t whole = round_up(found->second.bytes, kSharedAlignment);
  blocks().by_address.erase(found);
  unmap(host, whole);
  if (kMapsTwice) {
    blocks().by_address.erase(address_of(device));
    unmap(device, whole);
  }
  return true;
}

void unmap_all_memory() {
  const std::lock_guard lock(blocks().mutex);
  for (const auto& [address, block] : blocks().by_address)
    if (block.twin != nullptr) unmap(reinterpret_cast<void*>(address), round_up(block.bytes, kSharedAlignment));
}

MemoryBytes memory_bytes() {
  const std::lock_guard lock(blocks().mutex);
  MemoryBytes sum;
  for (const auto& [address, block] : blocks().by_address) {
    if (block.is_device && block.twin == nullptr) sum.device += block.bytes;
    if (!block.is_device && block.twin == nullptr) sum.pinned += block.bytes;
    if (block.is_device != kMapsTwice && block.twin != nullptr) sum.shared += block.bytes;
  }
  return sum;
}

bool is_device_memory(const void* data, int64_t bytes) {
  if (bytes == 0) return true;
  const std::lock_guard lock(blocks().mutex);
  const Block* block = blocks().find(data, bytes);
  return block != nullptr && block->is_device;
}

bool is_known_memory(const void* data, int64_t bytes) {
  const std::lock_guard lock(blocks().mutex);
  return blocks().find(data, bytes) != nullptr;
}

}  // namespace stand_in
