// SPDX-License-Identifier: MIT
// The device's side of the hand-over (lib/tables/device.h): tickets, waits for the host, and signals to the host.
//
// The next ticket is counted in device memory, so a replayed graph goes on where the call before it stopped. A read over
// the bus takes a microsecond. So the last value seen of `answered` is kept beside the ticket, and the host's own word is
// read only where that value is too old.
//
//   append    ticket = next        waits for answered > ticket + 1 - n_slots    writes, next = arrived = ticket + 1
//   merge     ticket = next - 1    waits for answered > ticket                  reads
//   observe   ticket = next - 1                                                 writes, observed = ticket + 1
//
// A wait that takes too long raises a fault, in device memory and where the host sees it. Every later call reads the fault
// first. Blocks that gave up are not counted, so nothing is handed over then.
//
// Order is by release and acquire at system scope. One thread of a block does either. Barriers extend the order to its
// other threads.
#pragma once

#include <cstdint>

#include "cuda/kernels/bulk_copy.cuh"
#include "lib/tables/device.h"
#include "lib/tables/lost_tickets.h"

namespace tandem::cuda {

// The words of DeviceExchange::state.
enum ExchangeWord : int32_t {
  kNextTicket,      // tickets handed over
  kSeenAnswered,    // the last value read of `answered`
  kFault,           // kFault..., or 0
  kBlocksDone,      // of the running append
  kBlocksObserved,  // of the running observe
  kBadIndices,      // wrong indices that the host has been told, or is about to be told
  kRowsWritten,     // epoch of the append whose rows the window has, until a merge after it; else 0
  kBlocksWritten,   // blocks of an append with an epoch that have written to the window
  kRowsSent,        // epoch of the append that has handed over, until a merge after it; else 0
};

using Word = unsigned long long;  // the type of atomic operations

// True if the host's answers say that this ticket is lost (lib/tables/lost_tickets.h).
__device__ inline bool is_lost(Word answered, Word ticket) {
  return answered >= kLostTickets && ticket >= answered - kLostTickets;
}

// A kernel may start before the kernel before it has ended, so that its launch takes no extra time. Between
// let_next_start() and wait_for_before() a kernel reads its arguments and descriptors, and nothing else that kernels write.
// The kernel that writes descriptors lets no kernel start before it has ended (upload.cuh).
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  let_next_kernel_start();
#endif
}
__device__ inline void wait_for_before() {
#if __CUDA_ARCH__ >= 900
  wait_for_kernel_before();
#endif
}
__device__ inline void begin_behind() {
  let_next_start();
  wait_for_before();
}

__device__ inline Word* word(const DeviceExchange& exchange, ExchangeWord which) {
  return reinterpret_cast<Word*>(exchange.state + which);
}

__device__ inline Word load_relaxed(const Word* from) {
  Word value;
  asm volatile("ld.relaxed.gpu.u64 %0, [%1];\n" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline Word load_acquire(const Word* from) {
  Word value;
  asm volatile("ld.acquire.gpu.u64 %0, [%1];\n" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline Word load_acquire_system(const uint64_t* from) {
  Word value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];\n" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline uint32_t load_busy(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];\n" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void fence_device() { asm volatile("fence.acq_rel.gpu;\n" ::: "memory"); }
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;\n" ::: "memory"); }
// A release, when a fence comes before it.
__device__ inline void store_system(uint64_t* to, Word value) {
  asm volatile("st.relaxed.sys.u64 [%0], %1;\n" ::"l"(to), "l"(value) : "memory");
}
__device__ inline void store_system(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.sys.u32 [%0], %1;\n" ::"l"(to), "r"(value) : "memory");
}
__device__ inline Word time_ns() {
  Word time;
  asm volatile("mov.u64 %0, %globaltimer;\n" : "=l"(time)::"memory");
  return time;
}

__device__ inline bool is_faulty(const DeviceExchange& exchange) { return load_relaxed(word(exchange, kFault)) != 0; }

__device__ inline void raise_fault(const DeviceExchange& exchange, uint32_t fault) {
  atomicMax(word(exchange, kFault), Word{fault});
  store_system(&exchange.flags->fault, fault);
}

// The state of the exchange. All loads are issued at once, and none is waited for before its value is used.
struct Standing {
  Word next_ticket, answered, fault;
};
__device__ inline Standing load_standing(const DeviceExchange& exchange) {
  return {load_relaxed(word(exchange, kNextTicket)), load_relaxed(word(exchange, kSeenAnswered)),
          load_relaxed(word(exchange, kFault))};
}

// Called by one thread. Waits until the host has answered `wanted` tickets, at least 1, and returns how many it has
// answered. Returns 0 if a fault is raised, by this wait or before.
//
// One block reads over the bus. Each read is for the line that the host is about to write, and delays that write. (With
// four blocks reading, the states of 32 heads come 1.4 us later, with sixteen warps 10 us.) The other blocks read the value
// that this block has seen. They read over the bus now and then, as the reading block may not be running yet.
__device__ inline Word wait_for_answers(const DeviceExchange& exchange, const Standing& standing, Word wanted,
                                        uint32_t fault, bool always_asks) {
  constexpr unsigned kTurns = 16;
  if (standing.fault != 0) return 0;
  Word* const seen = word(exchange, kSeenAnswered);
  if (standing.answered >= wanted) {
    fence_device();
    return standing.answered;
  }
  Word begin = time_ns();
  for (unsigned turn = 1;; ++turn) {
    const bool asks = always_asks || turn % kTurns == 0;
    const bool is_over = is_faulty(exchange);
    const Word answered = asks ? load_acquire_system(&exchange.flags->answered) : load_acquire(seen);
    if (answered >= wanted) {
      fence_device();  // whoever reads `seen` sees what this thread acquired
      if (asks) atomicMax(seen, answered);
      return answered;
    }
    if (is_over) return 0;
    if (time_ns() - begin >= static_cast<Word>(exchange.timeout_ns)) {
      if (load_busy(&exchange.flags->busy) == 0) {
        raise_fault(exchange, fault);
        return 0;
      }
      begin = time_ns();
    }
    __nanosleep(100);
  }
}

// Called by one thread of an append. Returns true once the ticket's slot is free, false if a fault is raised.
__device__ inline bool wait_for_slot(const DeviceExchange& exchange, const Standing& standing) {
  const auto n_slots = static_cast<Word>(exchange.n_slots), ticket = standing.next_ticket;
  if (ticket + 2 <= n_slots) return standing.fault == 0;
  return wait_for_answers(exchange, standing, ticket + 2 - n_slots, kFaultSlot, blockIdx.x == 0) != 0;
}

// Called by every thread of every block of an append, after its writes to the window. The last block publishes the epoch.
// The copy engine may read the rows. The proxy fence for that is on the side of attention, whether attention waits for the
// epoch itself or for a search that did (beside_append.cuh).
__device__ inline void say_rows_written(const DeviceExchange& exchange, int64_t epoch) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  fence_device();
  if (gridDim.x > 1) {
    if (atomicAdd(word(exchange, kBlocksWritten), Word{1}) + 1 < gridDim.x) return;
    *word(exchange, kBlocksWritten) = 0;
    fence_device();
  }
  *reinterpret_cast<volatile Word*>(word(exchange, kRowsWritten)) = static_cast<Word>(epoch);
}

// Called by every thread of every block of an append, after its writes. The last block hands over and publishes the epoch.
__device__ inline void hand_over(const DeviceExchange& exchange, Word ticket, int64_t epoch) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (gridDim.x > 1) {
    Word* const n_done = word(exchange, kBlocksDone);
    fence_system();
    if (atomicAdd(n_done, Word{1}) + 1 < gridDim.x) return;
    *n_done = 0;
  }
  *word(exchange, kNextTicket) = ticket + 1;
  fence_system();
  store_system(&exchange.flags->arrived, ticket + 1);
  *reinterpret_cast<volatile Word*>(word(exchange, kRowsSent)) = static_cast<Word>(epoch);
}

// Called by one thread. Waits until the append with the epoch has handed over, or has given up.
__device__ inline void wait_until_sent(const DeviceExchange& exchange, int64_t epoch) {
  while (load_acquire(word(exchange, kRowsSent)) != static_cast<Word>(epoch) && !is_faulty(exchange)) __nanosleep(50);
}

// Called at the end of an observe, whose blocks count themselves after a fence. The last block tells the host. From then on
// the host may read the writes of all blocks to the slot and to the windows.
__device__ inline void hand_over_observed(const DeviceExchange& exchange, Word n_tickets) {
  if (threadIdx.x != 0 || atomicAdd(word(exchange, kBlocksObserved), Word{1}) + 1 < gridDim.x) return;
  *word(exchange, kBlocksObserved) = 0;
  fence_system();
  store_system(&exchange.flags->observed, n_tickets);
}

__device__ inline std::byte* slot_of(const DeviceExchange& exchange, Word ticket) {
  return exchange.slots + static_cast<int64_t>(ticket % static_cast<Word>(exchange.n_slots)) * exchange.slot_bytes;
}

// Returns the index of the sequence that a row of q, o and lse belongs to, -1 if none. Whole warps call it. Their lanes
// look at 32 sequences at a time.
__device__ inline int find_sequence(const DeviceSequences& sequences, int row) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int found = -1;
#pragma unroll 4
  for (int first = 0; first < sequences.n_sequences; first += 32) {
    bool is_own = false;
    if (first + lane < sequences.n_sequences) {
      const DeviceSequence& sequence = sequences.sequences[first + lane];
      const int begin = sequence.first_row, end = begin + sequence.q_len;
      is_own = (row >= begin) & (row < end);
    }
    const unsigned owners = __ballot_sync(~0u, is_own);
    if (owners != 0) found = first + __ffs(static_cast<int>(owners)) - 1;
  }
  return found;
}

// True if no earlier sequence waits for the host. Whole warps call it.
__device__ inline bool is_first_to_wait(const DeviceSequences& sequences, int sequence_idx) {
  bool has_earlier = false;
  for (int i = static_cast<int>(threadIdx.x % 32); i < sequence_idx; i += 32)
    has_earlier |= sequences.sequences[i].has_host_part != 0 && sequences.sequences[i].q_len > 0;
  return !__any_sync(~0u, has_earlier);
}

// Returns the index of a token's row and query head among the rows of q, o and lse in a slot.
__device__ inline int64_t host_row(const DeviceSequence& sequence, int row, int head, int n_q_heads, int group_size) {
  const int token = row - sequence.first_row, kv_head = head / group_size;
  return int64_t{sequence.first_row} * n_q_heads + (int64_t{kv_head} * sequence.q_len + token) * group_size +
         head % group_size;
}

}  // namespace tandem::cuda
