// SPDX-License-Identifier: MIT
// The device's side of the hand-over (lib/tables/device.h): whose turn it is, waiting for the host, and telling it.
//
// A ticket is counted in device memory, so that a replayed graph goes on where the call before it stopped. Reading over the
// bus takes a microsecond: what was last seen of `answered` is kept beside the ticket, and only where that is too old is the
// host's own word read.
//
//   append    ticket = next        waits for answered > ticket + 1 - n_slots    writes, next = arrived = ticket + 1
//   merge     ticket = next - 1    waits for answered > ticket                  reads
//   observe   ticket = next - 1                                                 writes, observed = ticket + 1
//
// A wait that takes too long leaves a fault: in device memory, which every later call looks at first, and where the host
// sees it. Blocks that gave up are not counted, so nothing is handed over then.
//
// Order is by release and acquire at system scope. One thread of a block does either; barriers carry it to the others.
#pragma once

#include <cstdint>

#include "cuda/kernels/bulk_copy.cuh"
#include "lib/tables/device.h"
#include "lib/tables/lost_tickets.h"

namespace tandem::cuda {

// Of DeviceExchange::state.
enum ExchangeWord : int32_t {
  kNextTicket,      // tickets handed over
  kSeenAnswered,    // `answered`, when it was last read
  kFault,           // kFault..., or 0
  kBlocksDone,      // of the append that runs
  kBlocksObserved,  // of the observe that runs
  kBadIndices,      // indices told to the host as wrong, or about to be
  kRowsWritten,     // the epoch of the append whose rows the window has, until a merge behind it; or 0
  kBlocksWritten,   // of an append with an epoch
  kRowsSent,        // the epoch of the append that has handed over, until a merge behind it; or 0
};

using Word = unsigned long long;  // what atomic operations take

// Of what the host has answered: whether it lost this ticket (lib/tables/lost_tickets.h).
__device__ inline bool is_lost(Word answered, Word ticket) {
  return answered >= kLostTickets && ticket >= answered - kLostTickets;
}

// A kernel may be launched before the kernel before it has ended, so that its launch takes no time of its own. Between these
// two it reads nothing that kernels write but descriptors, whose kernel lets none begin before it has ended (upload.cuh),
// and what it is called with.
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
// Behind a fence: a release.
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

// How things stood, all of it asked for at once: nothing waits for it before it is used.
struct Standing {
  Word next_ticket, answered, fault;
};
__device__ inline Standing load_standing(const DeviceExchange& exchange) {
  return {load_relaxed(word(exchange, kNextTicket)), load_relaxed(word(exchange, kSeenAnswered)),
          load_relaxed(word(exchange, kFault))};
}

// Of one thread: how many tickets the host has answered, `wanted` or more; at least one is. 0: it was not in time, now or
// before, and the fault stands.
//
// One block asks over the bus: each question is for the line that the host is about to write, and holds it up (with four
// blocks asking, 32 heads' states come 1.4 us later; with sixteen warps, 10). The others read what it has seen, and ask now
// and then, as nobody promises that it is running.
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
      fence_device();  // who reads it there has what was acquired here
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

// Of one thread of an append: whether the ticket's slot is free.
__device__ inline bool wait_for_slot(const DeviceExchange& exchange, const Standing& standing) {
  const auto n_slots = static_cast<Word>(exchange.n_slots), ticket = standing.next_ticket;
  if (ticket + 2 <= n_slots) return standing.fault == 0;
  return wait_for_answers(exchange, standing, ticket + 2 - n_slots, kFaultSlot, blockIdx.x == 0) != 0;
}

// Of every thread of every block of an append, behind its writes to the window: the last block says that it has the rows.
// The copy engine may read them: attention has the fence of kinds of access for that, whether it waits for the epoch itself
// or for a search that did (beside_append.cuh).
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

// Of every thread of every block of an append, behind its writes: the last block hands over, and says so by the epoch.
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

// Of one thread: until the append with the epoch has handed over, or has given up.
__device__ inline void wait_until_sent(const DeviceExchange& exchange, int64_t epoch) {
  while (load_acquire(word(exchange, kRowsSent)) != static_cast<Word>(epoch) && !is_faulty(exchange)) __nanosleep(50);
}

// Of an observe, whose blocks count themselves behind a fence: the host may read what they wrote, in the slot and in the
// windows, as soon as all are counted. The last one says so.
__device__ inline void hand_over_observed(const DeviceExchange& exchange, Word n_tickets) {
  if (threadIdx.x != 0 || atomicAdd(word(exchange, kBlocksObserved), Word{1}) + 1 < gridDim.x) return;
  *word(exchange, kBlocksObserved) = 0;
  fence_system();
  store_system(&exchange.flags->observed, n_tickets);
}

__device__ inline std::byte* slot_of(const DeviceExchange& exchange, Word ticket) {
  return exchange.slots + static_cast<int64_t>(ticket % static_cast<Word>(exchange.n_slots)) * exchange.slot_bytes;
}

// Index of the sequence that a row of q, o and lse belongs to, -1: of none. Of whole warps, whose lanes look at 32 sequences
// at a time.
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

// Whether no sequence before it waits for the host. Of whole warps, likewise.
__device__ inline bool is_first_to_wait(const DeviceSequences& sequences, int sequence_idx) {
  bool has_earlier = false;
  for (int i = static_cast<int>(threadIdx.x % 32); i < sequence_idx; i += 32)
    has_earlier |= sequences.sequences[i].has_host_part != 0 && sequences.sequences[i].q_len > 0;
  return !__any_sync(~0u, has_earlier);
}

// Of a row of a sequence and a query head: its index among the rows of q, o and lse in a slot.
__device__ inline int64_t host_row(const DeviceSequence& sequence, int row, int head, int n_q_heads, int group_size) {
  const int token = row - sequence.first_row, kv_head = head / group_size;
  return int64_t{sequence.first_row} * n_q_heads + (int64_t{kv_head} * sequence.q_len + token) * group_size +
         head % group_size;
}

}  // namespace tandem::cuda
