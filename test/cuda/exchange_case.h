// SPDX-License-Identifier: MIT
// append() and merge() beside a model of them, shared by tests and benches of the handshake between host and device.
//
// The model keeps what the window's pool and the slots must hold, byte for byte. Bytes that no call may write are 0xff,
// which is NaN in every type. A host thread answers tickets, as the core does. Memory and calls come from the module alone.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "window_case.h"

namespace tandem::test {

struct ExchangeSequence {
  int64_t begin, end;
  int32_t q_len;
  bool has_host_part, wants_lse = false;
};

struct ExchangeOptions {
  reference::RefLayer layer;
  std::vector<ExchangeSequence> sequences;
  int32_t max_tokens = 0;  // tokens of a call; 0: the sum over the sequences
  int32_t tensor_type = TANDEM_BF16, o_type = TANDEM_F32;
  int32_t gap = 0;  // elements between rows of tensors
  int32_t page_len = 64, table_len = 4;
  int32_t n_slots = 2;
  int32_t n_batches = 1;  // batches of new rows
  bool has_rows = true;
  int32_t hidden_dim = 0, x_type = 0;  // of the hidden states; 0: the call has none
  bool is_wild = false;                // true: rows hold numbers that are hard to round
  int64_t timeout_ns = 20'000'000'000;
  uint64_t seed = 1;
};

// Waits for tickets and answers them in their order.
class AnsweringHost {
 public:
  AnsweringHost(ExchangeFlags* flags, std::function<void(uint64_t ticket)> answer);
  ~AnsweringHost();

 private:
  std::atomic<bool> stops_{false};
  std::thread thread_;
};

class ExchangeCase {
 public:
  ExchangeCase(const OpenDevice& device, const ExchangeOptions& options);
  ~ExchangeCase();
  ExchangeCase(const ExchangeCase&) = delete;

  DeviceAppend append_call;
  DeviceMerge merge_call;
  ExchangeFlags* flags = nullptr;
  DeviceError error;

  // Changes the descriptors that the device reads, as happens between two replays.
  void set_sequences(const std::vector<ExchangeSequence>& sequences);
  void load_batch(int32_t batch);  // copies the batch's rows to the place of the first batch
  void load_window_states(uint64_t seed);

  int32_t append(int32_t place = 0, void* stream = nullptr);  // appends the rows at that batch's place
  int32_t merge(void* stream = nullptr);
  // returns a host's answer: a function that writes the states of a ticket to its slot
  std::function<void(uint64_t)> leaves_states();
  void leaves_states_in(uint64_t ticket, std::byte* slot) const { write_states(ticket, slot); }
  std::byte* host_slot(uint64_t ticket) const;
  uint64_t arrived() const;
  void wait_for_host() const;                             // waits until every ticket is answered
  bool host_finds(uint64_t ticket, int32_t batch) const;  // true if the ticket's slot has its header and the batch's K rows

  // These advance the model: the rows that an append of this batch leaves, and the host's states.
  void expect_append(int32_t batch);
  void expect_states(uint64_t ticket);
  std::string check_memory() const;  // compares window and slots with the model; "": no difference
  std::string check_merge(uint64_t ticket) const;
  std::string check_all_nan() const;  // checks that merge() has left only NaN, as it must after a fault
  std::vector<std::byte> output() const;
  void clear_output();
  std::vector<std::byte> pool() const;

 private:
  struct Tensor {  // [n_batches][max_tokens][n_heads][dim]
    DeviceRows rows;
    int64_t n_heads = 0, dim = 0, batch_bytes = 0;
    std::vector<std::byte> bytes;
    std::vector<double> numbers;  // rounded to the tensor's type, without gaps
  };
  struct State {
    double lse;
    std::vector<double> o;
  };

  void make_layer();
  void make_pool();
  void make_exchange();
  void make_merge();
  Tensor make_tensor(reference::Random& random, int64_t n_heads, int64_t dim);
  double wild_number(reference::Random& random) const;
  void* own(const void* from, int64_t bytes);
  std::byte* slot(std::vector<std::byte>& slots, uint64_t ticket) const;
  void expect_row(int32_t plane, const double* numbers, const DeviceSequence& sequence, int32_t token, int32_t head);
  void expect_hidden(const double* x, std::byte* row) const;
  void write_states(uint64_t ticket, std::byte* slot) const;
  State host_state(uint64_t ticket, int64_t row) const;
  std::vector<State> states_of(uint64_t ticket, const DeviceSequence& sequence, int32_t token, int32_t head) const;
  std::string check_row(const std::vector<State>& states, const std::byte* o, const std::byte* lse) const;
  std::string check_between() const;
  int64_t lse_bytes() const;

  const OpenDevice& device_;
  ExchangeOptions options_;
  Layer layer_;
  PlaneBytes row_bytes_;
  Projection projection_;
  Tensor q_, k_, v_, x_;
  int64_t o_bytes_ = 0;
  std::vector<DeviceSequence> descriptors_;
  std::vector<int64_t> tables_;
  std::vector<std::byte> pool_, slots_;  // as the model has them
  int64_t page_bytes_ = 0, plane_at_[kPlanes] = {};
  std::byte *device_pool_ = nullptr, *host_slots_ = nullptr;
  uint64_t n_appended_ = 0;  // tickets that the model has appended
  std::vector<float> window_o_, window_lse_;
  std::vector<void*> owned_, shared_;
};

}  // namespace tandem::test
