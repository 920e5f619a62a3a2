// SPDX-License-Identifier: MIT
// The host's side of an exchange. The layout of its slots is arbitrary, with gaps.
#pragma once

#include <atomic>
#include <thread>

#include "device/stand_in_host.h"

namespace stand_in {

class HandOver {
 public:
  HandOver(Host* host, const tandem::Layer& layer, int32_t n_slots, int32_t n_tokens, int32_t n_evicted = 0) {
    using namespace tandem;
    const int64_t n_rows = int64_t{n_tokens} * layer.n_q_heads;
    int64_t end = sizeof(SlotHeader);
    const auto take = [&end](int64_t bytes) {
      const int64_t at = end;
      end = (at + bytes + 63) / 32 * 32;  // leaves a gap after each part
      return at;
    };
    exchange.lse_at = take(n_rows * 4);
    for (int32_t p = 0; p < kPlanes; ++p) exchange.rows_at[p] = take(n_tokens * layer.n_kv_heads * plane_bytes(layer).of[p]);
    exchange.q_at = take(n_rows * layer.k_head_dim * 4);
    exchange.o_at = take(n_rows * layer.v_head_dim * 4);
    exchange.n_evicted = n_evicted;
    if (n_evicted > 0) exchange.maw_at = take(int64_t{4} * n_evicted * layer.n_q_heads);
    exchange.slot_bytes = end;
    exchange.n_slots = n_slots;
    exchange.n_rows = n_tokens;
    exchange.timeout_ns = int64_t{60} * 1000 * 1000 * 1000;
    const Shared shared_flags = host->share(sizeof(ExchangeFlags)), shared_slots = host->share(n_slots * end);
    flags = reinterpret_cast<ExchangeFlags*>(shared_flags.host);
    exchange.flags = reinterpret_cast<ExchangeFlags*>(shared_flags.device);
    slots_ = shared_slots.host;
    exchange.slots = shared_slots.device;
    exchange.state = host->upload(std::vector<int64_t>(kExchangeWords, 0));
  }

  std::byte* slot(uint64_t ticket) const {
    return slots_ + static_cast<int64_t>(ticket % static_cast<uint64_t>(exchange.n_slots)) * exchange.slot_bytes;
  }
  const tandem::SlotHeader& header(uint64_t ticket) const {
    return *reinterpret_cast<const tandem::SlotHeader*>(slot(ticket));
  }
  float* floats(uint64_t ticket, int64_t at) const { return reinterpret_cast<float*>(slot(ticket) + at); }

  uint64_t arrived() const { return std::atomic_ref(flags->arrived).load(std::memory_order_acquire); }
  uint32_t fault() const { return std::atomic_ref(flags->fault).load(std::memory_order_acquire); }
  void await(uint64_t n) const {
    while (arrived() < n) std::this_thread::yield();
  }
  void answer(uint64_t n) const { std::atomic_ref(flags->answered).store(n, std::memory_order_release); }

  tandem::DeviceExchange exchange;
  tandem::ExchangeFlags* flags = nullptr;

 private:
  std::byte* slots_ = nullptr;
};

}  // namespace stand_in
