// SPDX-License-Identifier: MIT
// The exchange as append(), merge() and observe() use it: tickets, slots, and the wait for the host.
#pragma once

#include <atomic>
#include <chrono>
#include <vector>

#include "device/stand_in_call.h"
#include "lib/tables/lost_tickets.h"

namespace stand_in {

// A part of a slot, in bytes.
struct Part {
  int64_t begin, bytes;
};

// Checks that parts begin after the header and do not overlap.
void check_parts(const std::vector<Part>& parts, int64_t slot_bytes);
void check_exchange(const tandem::DeviceExchange& exchange);
// Returns the parts of states, and of MAW if the slot has room for any.
std::vector<Part> state_parts(const tandem::Layer& layer, const tandem::DeviceExchange& exchange, int64_t n_tokens);
// Returns the parts of queries and, if the call has any, of new rows.
std::vector<Part> row_parts(const tandem::Layer& layer, const tandem::DeviceExchange& exchange, int64_t n_tokens,
                            bool has_rows);

// Returns the row in a slot where q, o and lse of a sequence and KV head begin.
inline int64_t first_slot_row(const tandem::Layer& layer, const tandem::DeviceSequence& sequence, int32_t kv_head) {
  return int64_t{sequence.first_row} * layer.n_q_heads + int64_t{kv_head} * sequence.q_len * layer.group_size;
}

// The exchange as an operation of a stream sees it. state[0] is the next ticket.
class Exchange {
 public:
  explicit Exchange(const tandem::DeviceExchange& exchange) : exchange_(exchange) {}

  uint64_t next_ticket() const {
    const int64_t* state = exchange_.state;
    require(state[0] >= 0 && std::all_of(state + 1, state + tandem::kExchangeWords, [](int64_t word) { return word == 0; }),
            "the exchange's state was not zero at first");
    return static_cast<uint64_t>(state[0]);
  }
  void take_ticket() const { ++exchange_.state[0]; }
  std::byte* slot(uint64_t ticket) const {
    return exchange_.slots + static_cast<int64_t>(ticket % static_cast<uint64_t>(exchange_.n_slots)) * exchange_.slot_bytes;
  }
  void arrive(uint64_t n) const { std::atomic_ref(exchange_.flags->arrived).store(n, std::memory_order_release); }
  void observe(uint64_t n) const { std::atomic_ref(exchange_.flags->observed).store(n, std::memory_order_release); }
  bool has_lost(uint64_t ticket) const {
    const uint64_t answered = std::atomic_ref(exchange_.flags->answered).load(std::memory_order_acquire);
    return answered >= tandem::kLostTickets && ticket >= answered - tandem::kLostTickets;
  }
  bool is_faulty() const { return std::atomic_ref(exchange_.flags->fault).load(std::memory_order_relaxed) != 0; }

  // Waits until the host has answered n_answered tickets. False: the host was too late, now or before, or the device is
  // lost.
  bool wait_for(int64_t n_answered, uint32_t fault) const {
    using Clock = std::chrono::steady_clock;
    const std::atomic_ref answered(exchange_.flags->answered);
    if (is_faulty()) return false;
    auto end = Clock::now() + std::chrono::nanoseconds(exchange_.timeout_ns);
    while (static_cast<int64_t>(answered.load(std::memory_order_acquire)) < n_answered) {
      if (is_lost()) return false;
      const bool is_busy = std::atomic_ref(exchange_.flags->busy).load(std::memory_order_relaxed) != 0;
      if (is_busy) end = Clock::now() + std::chrono::nanoseconds(exchange_.timeout_ns);
      if (Clock::now() >= end) {
        std::atomic_ref(exchange_.flags->fault).store(fault, std::memory_order_release);
        return false;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    }
    return true;
  }

 private:
  const tandem::DeviceExchange& exchange_;
};

}  // namespace stand_in
