// SPDX-License-Identifier: MIT
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>

#include "lib/base/handle.h"

namespace tandem {
namespace {

struct Block {
  std::mutex mutex;  // guards kind and object
  HandleKind kind = HandleKind::kNone;
  std::shared_ptr<void> object;
  Block* next = nullptr;  // released after this one; guarded by Registry::mutex
};

constexpr int kMaxSlabs = 32;
constexpr int64_t slab_blocks(int slab_idx) { return int64_t{256} << slab_idx; }

struct Registry {
  std::mutex mutex;  // guards all but reads of slabs
  std::atomic<Block*> slabs[kMaxSlabs] = {};
  int n_slabs = 0;
  int64_t n_fresh = 0;  // blocks at the end of the newest slab that were never used
  Block* oldest = nullptr;
  Block* newest = nullptr;
  int64_t n_released = 0;
};

// The first slab is static memory, so unloading the library frees it. A destructor could not: it would also run at the end
// of the process, while other threads may still call.
alignas(Block) constinit std::byte first_slab[static_cast<size_t>(slab_blocks(0)) * sizeof(Block)] = {};

Block* make_slab(int slab_idx) {
  const auto n_blocks = static_cast<size_t>(slab_blocks(slab_idx));
  if (slab_idx > 0) return new Block[n_blocks];
  auto* const blocks = reinterpret_cast<Block*>(first_slab);
  std::uninitialized_default_construct_n(blocks, n_blocks);
  return blocks;
}

constinit Registry registry;
constinit std::atomic<bool> forked{false};
constinit std::atomic<bool> watching{false};

// Returns the block with this address; null if there is none. Never reads through the pointer.
Block* block_at(const void* handle) {
  const auto address = reinterpret_cast<uintptr_t>(handle);
  for (int i = 0; i < kMaxSlabs; ++i) {
    Block* slab = registry.slabs[i].load(std::memory_order_acquire);
    if (slab == nullptr) return nullptr;
    const uintptr_t offset = address - reinterpret_cast<uintptr_t>(slab);
    if (offset < static_cast<uintptr_t>(slab_blocks(i)) * sizeof(Block))
      return offset % sizeof(Block) == 0 ? slab + offset / sizeof(Block) : nullptr;
  }
  return nullptr;
}

Block* take_block() {
  const std::lock_guard lock(registry.mutex);
  if (registry.n_released > kQuarantine) {
    Block* block = registry.oldest;
    registry.oldest = block->next;
    --registry.n_released;
    return block;
  }
  if (registry.n_fresh == 0) {
    if (registry.n_slabs == kMaxSlabs) throw std::bad_alloc();
    const int64_t n_blocks = slab_blocks(registry.n_slabs);
    registry.slabs[registry.n_slabs].store(make_slab(registry.n_slabs), std::memory_order_release);
    ++registry.n_slabs;
    registry.n_fresh = n_blocks;
  }
  const int newest_slab = registry.n_slabs - 1;
  Block* slab = registry.slabs[newest_slab].load(std::memory_order_relaxed);
  return slab + slab_blocks(newest_slab) - registry.n_fresh--;
}

void give_block(Block* block) {
  const std::lock_guard lock(registry.mutex);
  block->next = nullptr;
  (registry.n_released == 0 ? registry.oldest : registry.newest->next) = block;
  registry.newest = block;
  ++registry.n_released;
}

const char* kind_name(HandleKind kind) {
  switch (kind) {
    case HandleKind::kEngine:
      return "an engine";
    case HandleKind::kModel:
      return "a model";
    case HandleKind::kCache:
      return "a cache";
    case HandleKind::kSession:
      return "a session";
    case HandleKind::kWeights:
      return "a set of weights";
    case HandleKind::kNone:
      break;
  }
  return "nothing";
}

}  // namespace

void* make_handle(HandleKind kind, std::shared_ptr<void> object) {
  Block* block = take_block();
  const std::lock_guard lock(block->mutex);
  block->kind = kind;
  block->object = std::move(object);
  return block;
}

Status find_handle(const void* handle, HandleKind kind, const char* parameter, std::shared_ptr<void>* object) {
  constexpr int32_t kCode = TANDEM_ERROR_INVALID_HANDLE;
  if (handle == nullptr) return fail(kCode, parameter, "%s = NULL is not a handle", parameter);
  Block* block = block_at(handle);
  if (block == nullptr) return fail(kCode, parameter, "%s = %p is not a handle of this library", parameter, handle);
  const std::lock_guard lock(block->mutex);
  if (block->kind == HandleKind::kNone) return fail(kCode, parameter, "%s = %p has been released", parameter, handle);
  if (block->kind != kind)
    return fail(kCode, parameter, "%s = %p is %s, not %s", parameter, handle, kind_name(block->kind), kind_name(kind));
  *object = block->object;
  return {};
}

void release_handle(const void* handle, HandleKind kind) noexcept {
  if (handle == nullptr || is_forked_child()) return;
  Block* block = block_at(handle);
  if (block == nullptr) return;
  std::shared_ptr<void> object;  // destroyed last, outside the locks
  {
    const std::lock_guard lock(block->mutex);
    if (block->kind != kind) return;
    block->kind = HandleKind::kNone;
    object = std::move(block->object);
  }
  give_block(block);
}

void watch_fork() {
  const std::lock_guard lock(registry.mutex);
  if (watching.load(std::memory_order_relaxed)) return;
  if (pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); }) != 0) throw std::bad_alloc();
  watching.store(true, std::memory_order_relaxed);
}

bool is_forked_child() noexcept { return forked.load(std::memory_order_relaxed); }

}  // namespace tandem
