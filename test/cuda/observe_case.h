// SPDX-License-Identifier: MIT
// A window with moving averages of attention weights, and observe() over it beside double precision, for tests and benches.
//
// Pages are in any order. Memory that holds nothing is 0xff, which is NaN in every type. Every byte that a call leaves is
// compared with the memory before the call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/open_device.h"
#include "lib/tables/device.h"
#include "reference/random.h"
#include "reference/reference_layer.h"

namespace tandem::test {

struct ObserveSequence {
  int64_t begin, end;
  int32_t q_len;
  int64_t n_evicted = 0;
};

struct ObserveOptions {
  reference::RefLayer layer;
  std::vector<ObserveSequence> sequences;
  int32_t max_tokens = 0;  // tokens of a call; 0: the sum over the sequences
  int32_t q_type = TANDEM_BF16;
  int32_t gap = 0;  // elements between rows of q
  int32_t page_len = 64, table_len = 5;
  float alpha = 0.3f;
  int32_t n_counted = 1 << 20;
  bool has_appended = true;
  bool is_full = false;    // every slot of the pool has keys and averages, also the slots of no sequence
  int32_t n_distinct = 0;  // pages that differ, the others repeat them; 0: all pages differ
  int32_t n_copies = 1;    // copies of the window, for benches
  int64_t max_keys = INT32_MAX;
  double q_size = 1.0;  // standard deviation of q's numbers
  uint64_t seed = 1;
};

class ObserveCase {
 public:
  ObserveCase(const OpenDevice& device, const ObserveOptions& options);
  ~ObserveCase();
  ObserveCase(const ObserveCase&) = delete;

  DeviceAppend append_call;  // appends only queries: takes a ticket
  DeviceObserve observe_call;
  ExchangeFlags* flags = nullptr;
  DeviceError error;

  // Changes the descriptors that the device reads, as happens between two replays. The queries get new lse.
  void set_sequences(const std::vector<ObserveSequence>& sequences);
  void answer(uint64_t n_tickets) const;
  int32_t append(void* stream = nullptr);
  int32_t observe(void* stream = nullptr, int32_t copy = 0);
  uint64_t observed() const;

  struct Memory {
    std::vector<std::byte> pool, slots;
    bool operator==(const Memory&) const = default;
  };
  Memory memory() const;
  void restore(const Memory& memory) const;
  // Compares the memory after one observe() of the ticket with the expected one. "": it is right.
  std::string check(const Memory& before, uint64_t ticket) const;
  int64_t k_bytes() const;  // bytes of the keys that an observe reads

 private:
  void make_pool(reference::Random& random);
  void fill_slot(reference::Random& random, int64_t page, int32_t slot, bool has_maw);
  void make_queries(reference::Random& random);
  void make_exchange();
  void make_lse();
  void* own(const void* from, int64_t bytes);
  void* share(int64_t bytes, void** device);
  // Page 0 of the tables is the first sequence's first page, as in a session. Other pages lie before it.
  int64_t called_0() const { return tables_.empty() ? 0 : tables_[0]; }
  int64_t page_of(const DeviceSequence& sequence, int64_t token) const;  // index of the token's page in the pool
  std::vector<double> keys_of(const DeviceSequence& sequence, int32_t kv_head) const;

  struct Logit {
    double value, error;  // error: bound of the error of f32 arithmetic
  };
  struct Expected {
    const DeviceSequence* sequence;
    const std::vector<double>* keys;
    int64_t slot;  // index of the slot among the slots
  };
  Logit logit_of(int64_t row, int32_t head, const double* key) const;
  // Replaces every right number in *after by its bytes before the call, so that other changes stand out.
  std::string check_head(const Expected& expected, int32_t head, const Memory& before, Memory* after) const;

  const OpenDevice& device_;
  ObserveOptions options_;
  Layer layer_;
  PlaneBytes row_bytes_;
  std::vector<DeviceSequence> descriptors_;
  std::vector<int64_t> tables_;  // bytes from the first page of the pool
  std::vector<std::byte> pool_;
  int64_t page_bytes_ = 0, plane_at_[kPlanes] = {}, maw_at_ = 0;
  std::vector<std::byte*> device_pools_;
  std::byte* host_slots_ = nullptr;
  std::vector<double> q_;   // [max_tokens, n_q_heads, dim]
  std::vector<float> lse_;  // [max_tokens, n_q_heads]
  uint64_t n_sets_ = 0;
  std::vector<void*> owned_, shared_;
};

}  // namespace tandem::test
