// SPDX-License-Identifier: MIT
// The copy engine of compute capability 9.0: a lane asks for whole boxes of rows, which arrive in shared memory and count
// themselves in at a barrier there. And the order of kernels: one starts while the one before it ends.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/decode_call.h"

namespace tandem::cuda {

// Rows of a plane in shared memory, kKeys of them, in panels: of each row 128 bytes (64, 32 where rows are as short), one
// row behind the other. So that 8 rows never share a bank, 16-byte pieces of a row change places: bits 4 to 6 of an address
// within a panel are its bits 7 to 9 more (fewer bits in narrower panels). This is what the engine calls a swizzle.
template <int kRowBytes_, int kKeys_>
struct Panels {
  static constexpr int kRowBytes = kRowBytes_, kKeys = kKeys_;
  static constexpr int kWidth = kRowBytes > 64 ? 128 : kRowBytes > 32 ? 64 : 32;
  static constexpr int kCount = (kRowBytes + kWidth - 1) / kWidth;
  static constexpr int kPanelBytes = kWidth * kKeys, kBytes = kPanelBytes * kCount;

  // A lane's row, at its `odd`-th of a pair of 16-byte pieces; at() goes on from there. The 8th row from here is 8 * kWidth
  // on, its pieces in the same places.
  __device__ static uint32_t row(uint32_t base, int key, int odd) {
    return base + key * kWidth + ((odd * 16) ^ (key * kWidth / 8 & (kWidth - 16)));
  }
  // From row() to the pair of pieces that begins at piece `piece` (or, where odd was 0, to any piece).
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
// What was stored to shared memory comes before what the engine will.
__device__ inline void order_before_copies() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

__device__ inline void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// The barrier's phase waits for this many bytes from the copy engine as well. This is no arrival.
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

// One lane of a warp, the same each time: what it asks for the compiler then knows to be asked for once.
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

// What a call reads once leaves the cache of the second level first. What stays there is what all calls read: their code, to
// begin with. Otherwise each line of it comes from memory again.
__device__ inline uint64_t streaming_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}
// For rows that other blocks read as well.
__device__ inline uint64_t reused_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

// A box of rows anywhere in memory, from a multiple of 16 on. Maps (kernel_setup.cu) have all of memory in their last two
// dims: rows that begin 16 bytes apart, and those of the next 1 MiB, so that pages may be wherever they are.
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

// To the cache of the second level, where others will still see to what it holds.
__device__ inline void prefetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(at) : "memory"); }
// A multiple of 16 bytes, likewise.
__device__ inline void prefetch_bytes(const void* at, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(at), "r"(bytes) : "memory");
}

// The kernel before has ended, and what it wrote is there.
__device__ inline void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }
// The kernel behind may start where there is room: it will wait for this one's end.
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory"); }

// Adds to a count, after everything that the block has stored (a barrier before) and before what it will load (one behind).
__device__ inline int32_t add_in_order(int32_t* count, int32_t n) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;\n" : "=r"(before) : "l"(count), "r"(n) : "memory");
  return before;
}

}  // namespace tandem::cuda
