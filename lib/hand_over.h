// SPDX-License-Identifier: MIT
// The host's side of calls on device tensors: a thread that waits for each ticket to arrive (lib/device.h has the protocol),
// takes its rows into the store, attends to the keys outside the window on the CPU's pool, and answers.
//
// A task says what to do about a ticket. It is complete when it is posted: it holds addresses and nothing that later calls
// change, so the thread takes no lock of the cache's. Tasks are answered in the order of posting.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lib/attend_scratch.h"
#include "lib/device_owner.h"
#include "lib/planes.h"

namespace tandem {

// n rows from a slot to the store.
struct RowCopy {
  Rows from, to;
  int64_t n_rows = 0;
};

// Tokens from `length` on are lost when the ticket never arrives.
struct AppendedTokens {
  int64_t sequence = 0;
  int64_t length = 0;
};

struct HandOverTask {
  int32_t layer_idx = 0;
  PlaneBytes row_bytes;
  std::vector<RowCopy> rows;
  std::vector<AppendedTokens> appended;
  AttendScratch scratch;  // jobs: q, o and lse are in the slot
  bool is_lost = false;   // it never arrived
};

class HandOver {
 public:
  static constexpr int64_t kTasks = 64;  // under way at most

  static Status create(const Device& device, const Backend& cpu, std::unique_ptr<HandOver>* hand_over);
  ~HandOver();  // waits for what is under way, unless the device is lost

  // Flags that the device has written nothing to yet; tickets begin with 0. Nothing is under way.
  void restart(ExchangeFlags* flags);
  // The next ticket's task, to be filled and posted; waits while kTasks are under way.
  HandOverTask& next_task();
  uint64_t next_ticket() const { return posted_.load(std::memory_order_relaxed); }
  void post();
  bool is_idle() const { return finished_.load(std::memory_order_acquire) == posted_.load(std::memory_order_acquire); }
  void drain();  // until it is idle
  // Sums of tasks that are done.
  struct Sums {
    int64_t n_host_parts = 0, host_part_ns = 0, staged_kv_bytes = 0;
  };
  Sums sums() const;
  bool is_settled() const { return is_idle() && !has_lost_.load(std::memory_order_acquire); }
  // Why no ticket will arrive any more; ok as long as they do.
  Status fault() const;
  struct Lost {
    int32_t layer_idx;
    AppendedTokens tokens;
  };
  std::vector<Lost> take_lost();  // of tasks that were not done; it is idle

 private:
  HandOver(const Device& device, const Backend& cpu) : device_(device), cpu_(cpu) {}
  void loop();
  bool wait_for_post();
  bool wait_for_arrival(uint64_t ticket);
  void check_device();
  void work(HandOverTask& task);
  void count(const HandOverTask& task, int64_t ns);
  void set_fault(int32_t code, int64_t underlying, const char* text);
  static void copy_task(void* task, int64_t idx, int32_t worker_idx);

  const Device& device_;
  Backend cpu_;
  ExchangeFlags* flags_ = nullptr;
  std::vector<HandOverTask> tasks_{static_cast<size_t>(kTasks)};  // of ticket t: t % kTasks
  std::atomic<uint64_t> posted_{0}, finished_{0};
  std::atomic<bool> faulted_{false}, has_lost_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_posted_, changed_finished_;
  int32_t fault_code_ = TANDEM_OK;  // guarded by mutex_, as what follows
  int64_t fault_underlying_ = 0;
  char fault_text_[256] = "";
  Sums sums_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tandem
