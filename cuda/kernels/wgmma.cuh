// SPDX-License-Identifier: MIT
// Matrix products of a warpgroup (compute capability 9.0), whose operands lie in shared memory, and the instructions that
// order them: barriers in shared memory, fences, and registers moved between warps.
//
// A matrix of 16-bit numbers lies in blocks of 64 columns. A block has rows of 128 bytes and is 1,024-byte aligned. Its
// 16-byte pieces are swizzled: piece p of row r lies at p ^ r % 8. K is read with dims as the inner dimension, V with keys
// as the inner dimension, so the same layout of rows serves both.
#pragma once

#include "cuda/kernels/warp_ops.cuh"

namespace tandem::cuda {

// Returns the bytes from the start of a block of 64 columns to a piece of a row.
__device__ inline uint32_t swizzled(int row, int piece) { return row * 128 + ((piece ^ row % 8) << 4); }

// Makes the descriptor of a matrix that lies as above. block_bytes: bytes from one block of 64 columns to the next, for V.
__device__ inline uint64_t describe_matrix(uint32_t at, int block_bytes) {
  return uint64_t{(at & 0x3ffff) >> 4} | static_cast<uint64_t>(block_bytes >> 4) << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

// Products into d [64 x kWidth] of a warpgroup. A warp has 16 rows. A thread has its part of a C fragment (warp_ops.cuh) of
// each 8 columns.
//   keys:   d = a b^T or d += a b^T, a [64 x 16] and b [kWidth x 16] in shared memory
//   values: d += a b, a a fragment in registers, b [16 x kWidth] in shared memory
//   rows:   d = a b^T or d += a b^T, a a fragment in registers, b [kWidth x 16] in shared memory
template <class Number, int kWidth>
struct Wgmma;
#include "wgmma_shapes.inc"

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Keeps the compiler from reading the sums before the products have finished.
template <int n>
__device__ inline void pin(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Makes the threads' writes to shared memory visible to products.
__device__ inline void fence_products() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

__device__ inline void init_barrier(uint32_t barrier, int n_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(n_arrivals) : "memory");
}
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// Makes the thread arrive once all copies that it has started (copy_async()) have finished.
__device__ inline void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}
__device__ inline void wait_barrier(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra "
      "WAIT;\nDONE:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Barriers of some of a block's threads.
__device__ inline void sync_threads(int barrier, int n_threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(n_threads) : "memory");
}
__device__ inline void arrive_threads(int barrier, int n_threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(n_threads) : "memory");
}
// As sync_threads(). Returns whether x is true in any of the threads.
__device__ inline bool any_of_threads(int barrier, int n_threads, bool x) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %3, 0;\nbarrier.cta.red.or.pred.aligned q, %1, %2, p;\nselp.b32 %0, 1, 0, q;\n}\n"
      : "=r"(any)
      : "r"(barrier), "r"(n_threads), "r"(static_cast<int>(x))
      : "memory");
  return any != 0;
}

// Change the registers of each thread of a warpgroup. All its warps call these together.
template <int n>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(n));
}
template <int n>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(n));
}

}  // namespace tandem::cuda
