// SPDX-License-Identifier: MIT
// The host's side of calls on device tensors. A thread waits for each ticket to arrive (lib/tables/device.h has the
// protocol), takes its rows into the store, attends the keys outside the window on the CPU's pool, and answers.
//
// An error becomes a fault (lib/device/device_fault.h). After a fault that allows further calls, the current task and all
// later ones are lost, even if their tickets arrive. The next settle() rolls them back. All answers are given, so no kernel
// waits. When the device is idle, tickets restart at 0. After a lack of memory a task still ends only when the device is
// done with it. After a fault of a step the thread does not wait for tickets.
#pragma once

#include <thread>

#include "lib/device/device_fault.h"
#include "lib/device/part_learner.h"
#include "lib/device/task_ring.h"
#include "lib/machine/device_ref.h"

namespace tandem {

class HandOver final : public TaskRing {
 public:
  // Owned by the engine. under_way: counts tasks. profile: learns the times of tasks.
  struct Counters {
    UnderWay* under_way;
    Profile* profile;
  };
  // n_tasks: maximum number of tasks at a time, a power of two.
  static Status create(const Device& device, const Backend& cpu, int64_t n_tasks, const Counters& counters,
                       std::unique_ptr<HandOver>* hand_over);
  ~HandOver() { stop(); }
  void stop();  // waits for work in flight, unless the device is lost; ends the thread
  // Once no work is in flight, the thread calls end(context) and ends. `end` may destroy this object.
  void retire(void (*end)(void* context), void* context);

  // Switches to new flags, all zero. Tickets restart at 0. The ring is idle. The old flags must still be allocated.
  void restart(ExchangeFlags* flags);
  // Keeps the flags, clears the fault and restarts tickets at 0. Ring and device are idle.
  void start_over();
  TaskSums sums() const;
  // True while the CPU's pool attends for a ticket.
  bool is_computing() const { return std::atomic_ref(flags_->busy).load(std::memory_order_relaxed) != 0; }
  double bus_ahead_ns(int32_t layer_idx, int64_t n_queries) const;  // see lib/rates/part_times.h
  // Returns the error that a kernel found in the indices of an earlier call (INVALID_ARGUMENT, selection.idx). Reports it
  // once.
  Status take_bad_index();
  // Returns why no more tickets will arrive; ok as long as they do.
  Status fault();
  // True if the fault is of a step or of memory. The device still works.
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
  BadIndex bad_index_;  // from flags that have been replaced; n_told 0: none
  DeviceFault fault_;
  PartLearner learner_;  // guarded by the ring's mutex, except for the thread's own parts
  std::atomic<bool> stop_{false}, retires_{false};
  void (*end_)(void* context) = nullptr;  // this and end_context_ are set before retires_
  void* end_context_ = nullptr;
  std::thread thread_;
};

}  // namespace tandem
