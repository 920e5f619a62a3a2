// SPDX-License-Identifier: MIT
// The host's side of calls on device tensors: a thread that waits for each ticket to arrive (lib/tables/device.h has the
// protocol), takes its rows into the store, attends to the keys outside the window on the CPU's pool, and answers.
//
// An error becomes a fault (lib/device/device_fault.h). After a fault that calls may follow, this task and all later ones
// are lost, even if their tickets arrive, and the next settle() rolls them back. All answers are given, so no kernel waits.
// When the device is idle, tickets begin with 0 again. After a lack of memory a task still ends only when the device is done
// with it; after a fault of a step the thread does not wait for tickets.
#pragma once

#include <thread>

#include "lib/device/device_fault.h"
#include "lib/device/part_learner.h"
#include "lib/device/task_ring.h"
#include "lib/machine/device_ref.h"

namespace tandem {

class HandOver final : public TaskRing {
 public:
  // The engine's. under_way: counts tasks; profile: learns what they take.
  struct Counters {
    UnderWay* under_way;
    Profile* profile;
  };
  // n_tasks: at most at a time, a power of two.
  static Status create(const Device& device, const Backend& cpu, int64_t n_tasks, const Counters& counters,
                       std::unique_ptr<HandOver>* hand_over);
  ~HandOver() { stop(); }
  void stop();  // waits for what is under way, unless the device is lost; the thread ends
  // When nothing is under way any more the thread does end(context) and is over; `end` may destroy this.
  void retire(void (*end)(void* context), void* context);

  // New flags, all zero: tickets begin with 0. The ring is idle. The old flags must still be allocated.
  void restart(ExchangeFlags* flags);
  // The same flags: tickets begin with 0, and there is no fault any more. Ring and device are idle.
  void start_over();
  TaskSums sums() const;
  // Whether the CPU's pool attends for a ticket just now.
  bool is_computing() const { return std::atomic_ref(flags_->busy).load(std::memory_order_relaxed) != 0; }
  double bus_ahead_ns(int32_t layer_idx, int64_t n_queries) const;  // lib/rates/part_times.h
  // What a kernel has found wrong with the indices of an earlier call (INVALID_ARGUMENT, selection.idx), told once.
  Status take_bad_index();
  // Why no ticket will arrive any more; ok as long as they do.
  Status fault();
  // The fault is of a step, or of memory: the device is well.
  bool can_start_over() const { return fault_.can_start_over(); }

 private:
  HandOver(const Device& device, const Backend& cpu, int64_t n_tasks, const Counters& counters)
      : TaskRing(cpu, n_tasks, *counters.under_way), device_(device), learner_(*counters.profile) {}
  void loop();
  void meet(HandOverTask& task);
  bool wait_for_post();
  template <typename F>
  bool wait_for(F has_come);
  bool wait_for_arrival(const HandOverTask& task, StreamEnd* stream);
  bool wait_for_observation(const HandOverTask& task);
  void wait_for_stream(const HandOverTask& task, StreamEnd* end);
  void lose(HandOverTask* task);
  void finish(HandOverTask& task, const TaskTimes& times, int64_t staged_bytes);
  template <typename F>
  void while_busy(const char* no_memory, F action);
  void check_device();
  void check_flags();
  bool is_over(const HandOverTask& task) const;
  void fault_of_step(const HandOverTask& task);
  void answer(const HandOverTask& task);
  void attend(HostPart& part, StreamEnd* stream);

  const Device& device_;
  ExchangeFlags* flags_ = nullptr;
  BadIndex bad_index_;  // found in flags that are gone, if n_told is not 0
  DeviceFault fault_;
  PartLearner learner_;  // guarded by the ring's mutex, but for what is the thread's
  std::atomic<bool> stop_{false}, retires_{false};
  void (*end_)(void* context) = nullptr;  // before retires_ is set, as what follows
  void* end_context_ = nullptr;
  std::thread thread_;
};

}  // namespace tandem
