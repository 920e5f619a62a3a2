// SPDX-License-Identifier: MIT
// Attention beside the append that brings its rows (lib/tables/device.h, DeviceAttend::append), for compute capability 9.0.
//
// The append writes the window's rows, publishes its epoch, and then sends the rows to the host. Attention begins at the
// epoch. Both kernels run at once, so each attention kernel leaves the append's multiprocessors out of its grid
// (append_blocks()). A block that waited for one of them would end last.
#pragma once

#include "cuda/kernels/bulk_copy.cuh"

namespace tandem::cuda {

// Waits for the writes of earlier kernels. If the call has an append that runs beside this kernel, waits for its rows only.
// The append writes the rows after every earlier kernel has ended, so a thread that sees the rows sees those kernels'
// results, too.
__device__ inline void wait_for_rows(const DecodeCall& call) {
  if (call.rows_written == nullptr) {
    wait_for_kernel_before();
    // The kernel before is a search. It may have run beside the append, which may not have ended yet.
    if (call.lists.are_written_by_kernels != 0) asm volatile("fence.proxy.async;\n" ::: "memory");
    return;
  }
  if (threadIdx.x == 0) {
    int64_t written = 0;
    do asm volatile("ld.acquire.gpu.s64 %0, [%1];\n" : "=l"(written) : "l"(call.rows_written) : "memory");
    while (written != call.epoch);
  }
  __syncthreads();
  asm volatile("fence.proxy.async;\n" ::: "memory");
}
// Waits for the append's end. The next kernel waits for this one only, so this one may not end before the append has.
__device__ inline void wait_for_append(const DecodeCall& call) {
  if (call.rows_written != nullptr) wait_for_kernel_before();
}

}  // namespace tandem::cuda
