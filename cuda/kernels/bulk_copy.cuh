// SPDX-License-Identifier: MIT
// The copy engine of compute capability 9.0. One lane starts copies of whole boxes of rows. They arrive in shared memory,
// and their bytes count at a barrier there. Also the order of kernels: the next kernel starts while the one before it ends.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/decode_call.h"

namespace tandem::cuda {

// kKeys rows of a plane in shared memory, in panels. A panel has 128 bytes of each row (64 or 32 for short rows), row after
// row. The 16-byte pieces of a row change places, so that 8 rows never share a bank: bits 4 to 6 of an address within a
// panel are XORed with its bits 7 to 9 (fewer bits in narrower panels). The engine calls this a swizzle.
template <int kRowBytes_, int kKeys_>
struct Panels {
  static constexpr int kRowBytes = kRowBytes_, kKeys = kKeys_;
  static constexpr int kWidth = kRowBytes > 64 ? 128 : kRowBytes > 32 ? 64 : 32;
  static constexpr int kCount = (kRowBytes + kWidth - 1) / kWidth;
  static constexpr int kPanelBytes = kWidth * kKeys, kBytes = kPanelBytes * kCount;

  // Returns the address of a lane's row at piece `odd` of a pair of 16-byte pieces. at() goes on from there. The 8th row
  // from here lies 8 * kWidth further on, with its pieces in the same places.
  __device__ static uint32_t row(uint32_t base, int key, int odd) {
    return base + key * kWidth + ((odd * 16) ^ (key * kWidth / 8 & (kWidth - 16)));
  }
  // Goes from row() to the pair of pieces that begins at piece `piece` (where odd was 0, to any piece).
  __device__ static uint32_t at(uint32_t row, int piece) {
    return (row ^ (16 * piece % kWidth)) + 16 * piece / kWidth * kPanelBytes;
  }
};

__device__ inline void init_barrier(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(barrier) : "memory");
}
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::: "memory");
}
// Orders earlier stores to shared memory before later writes of the engine.
__device__ inline void order_before_copies() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

__device__ inline void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// Adds bytes that the barrier's current phase expects from the copy engine. Does not count as an arrival.
__device__ inline void expect_more_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void wait_for_phase(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// True in one lane of the warp, always the same one. The compiler then knows that the code below runs once a warp.
__device__ inline bool is_elected() {
  uint32_t result;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}\n"
      : "=r"(result));
  return result != 0;
}

// The policy for data that a call reads once: such data leaves the L2 cache first. Data that every call reads stays there,
// first of all code. Without this policy each line of code comes from memory again.
__device__ inline uint64_t streaming_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}
// The policy for rows that other blocks read as well.
__device__ inline uint64_t reused_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

// Copies a box of rows from any address that is a multiple of 16. The last two dims of a map (kernel_setup.cu) span all of
// memory: rows that begin 16 bytes apart, then steps of 1 MiB. So pages may lie anywhere.
__device__ inline void copy_box(uint32_t to, const CUtensorMap* map, int32_t first_byte, const std::byte* rows,
                                uint32_t barrier, uint64_t policy) {
  const uint64_t at = reinterpret_cast<uint64_t>(rows) - kMapBase;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;\n"
      :
      : "r"(to), "l"(map), "r"(first_byte), "r"(0), "r"(static_cast<int32_t>(at >> 4 & 0xffff)),
        "r"(static_cast<int32_t>(at >> 20)), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ inline void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// Prefetches a line to the L2 cache.
__device__ inline void prefetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(at) : "memory"); }
// Prefetches `bytes` bytes, a multiple of 16, to the L2 cache.
__device__ inline void prefetch_bytes(const void* at, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(at), "r"(bytes) : "memory");
}

// Waits until the kernel before has ended and its writes are visible.
__device__ inline void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }
// Lets the next kernel start where there is room. It waits for this kernel's end.
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory"); }

// Adds to a count. The add comes after all stores of the block (barrier before) and before its later loads (barrier
// behind). Returns the count before the add.
__device__ inline int32_t add_in_order(int32_t* count, int32_t n) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;\n" : "=r"(before) : "l"(count), "r"(n) : "memory");
  return before;
}

}  // namespace tandem::cuda
