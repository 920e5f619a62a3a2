// SPDX-License-Identifier: MIT
// Tasks of a session on a device, in the order of their tickets. The calling thread fills them. The thread of
// lib/device/hand_over.h carries them out.
//
// A task says what to do about a ticket. It is complete when it is posted: it holds addresses and no state that later calls
// change, so the thread needs no lock of the cache. Tasks are answered in the order of posting.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "lib/base/under_way.h"
#include "lib/call/attend_scratch.h"
#include "lib/call/key_route.h"
#include "lib/call/ticket.h"

namespace tandem {

// A sequence before a call, in the call's layer. If the ticket never arrives, the cache restores length and window begin. If
// it arrived but was not observed, only the window begin is restored, as the evicted keys have not been judged.
struct TouchedSequence {
  int64_t sequence = 0;
  int64_t length = 0;
  int64_t window_begin = 0;
};

// Processors of a chunk's keys outside the window, and what the profile may learn from the time that they take.
struct HandOverPart {
  const Layer* layer = nullptr;
  int64_t key_bytes = 0;  // of a token, over all KV heads
  int64_t host_tokens = 0, streamed_tokens = 0;
  int64_t n_queries = 0;      // maximum over the sequences
  int64_t weighed_keys = 0;   // the CPU's keys, scaled as if each met n_queries queries
  int64_t ahead_bytes = 0;    // bytes that the buffers can take before the queries arrive
  bool tells = false;         // the part is large and undisturbed enough to learn from
  bool bus_tells = true;      // false: making keys takes longer than the bus, so the time says nothing about the bus
  bool keeps_hidden = false;  // the plan could have made keys from hidden states and chose not to
  int64_t n_pieces = 0;       // pieces that cross the bus, over all routes
  int64_t x_bytes = 0;        // bytes of hidden states that cross the bus
  int64_t n_made_rows = 0;    // rows of keys that the device makes from them
  bool is_rows = false;       // rows of a long append, whose queries do not come with its tickets
  double predicted_ns = 0.0;  // 0: unknown
  // begins_long: the part has the first rows of a long append, which arrive when the append's queries are there. From this
  // moment until the append's last piece has crossed the bus, fixed_ns + expected_ns should pass, if a tile takes tile_ns.
  // The profile corrects tile_ns by the time that passed in fact. expected_ns 0: nothing to learn.
  bool begins_long = false;
  double tile_ns = 0.0, expected_ns = 0.0, fixed_ns = 0.0;

  bool operator==(const HandOverPart& other) const = default;
};

// Data shared by the tasks of a planned step whose layers are alike.
struct StepCalls {
  std::vector<SequenceCall> calls;
  std::vector<int64_t> begin, end;  // ranges of `calls`' visibility
  TicketRows rows;
  std::vector<TouchedSequence> touched;
};

struct HandOverTask {
  uint64_t idx = 0;     // index among all tasks
  uint64_t ticket = 0;  // the device's number of the ticket
  TicketShape shape;
  const SlotHeader* header = nullptr;
  uint64_t step = 0;                           // number of the planned step that the task is part of, from 1; 0: none
  const StepCalls* shared = nullptr;           // null: the task has its own calls
  std::vector<TouchedSequence> touched_alone;  // used when `shared` is null
  AttendScratch scratch;
  // Each route's notes of the chunk. The pages that they point to must not change until the task is finished.
  std::array<std::unique_ptr<RouteNotes>, kMostRoutes> notes;
  std::array<size_t, kMostRoutes> n_pieces{};
  std::array<uint8_t*, kMostRoutes> sent{};  // 1: all of a route's pieces have left the host; null: the route has no pieces
  std::vector<std::byte*> bases;             // of the store's extents, if they are needed
  std::vector<Launch> launches;              // after the window's
  uint8_t* merged = nullptr;  // the device sets it to merged_mark once the chunk's states are merged; null: never
  uint8_t merged_mark = 0;    // differs from the mark of the task that had this place before, whose flag may be set late
  std::chrono::steady_clock::time_point asked;  // just before the call asked for copies
  HandOverPart part;
  int64_t copied_bytes = 0;  // bytes of rows that the device has copied to the store by the time the ticket arrives
  // For a long chunk: the keys that its last query attends, in the form of LayerState::named. Noted with the chunk's ticket.
  LayerState* named_in = nullptr;
  NotedKeys named;
  std::atomic<bool> is_lost{false};        // the ticket never arrived
  std::atomic<bool> is_unseen{false};      // the ticket arrived and was never observed
  std::atomic<bool> launch_failed{false};  // a launch after append() failed: the device sends nothing more
  bool rolls_back = false,
       moves_window_back = false;  // copies of is_lost and is_unseen by mark_lost(); guarded by the cache's mutex
  bool is_last = false;  // the last task of a closed step: the CPU workers rest after it; guarded by the ring's mutex

  const std::vector<TouchedSequence>& touched() const { return shared != nullptr ? shared->touched : touched_alone; }
  int32_t step_tag() const { return static_cast<int32_t>(step & 0x7fffffff); }
  // True if the slot that arrived is of this task.
  bool is_its_own() const { return shape.is_served_by(*header) && header->step == step_tag(); }
};

class TaskRing {
 public:
  // n_tasks: maximum number of tasks at a time, a power of two. cpu: its workers stay awake while a step is open. under_way:
  // counts tasks.
  TaskRing(const Backend& cpu, int64_t n_tasks, UnderWay& under_way)
      : cpu_(cpu), under_way_(under_way), tasks_(static_cast<size_t>(n_tasks)) {}
  TaskRing(const TaskRing&) = delete;

  // Returns the task of the next ticket, or of the one `ahead` later, to be filled and posted. Waits while its place is
  // taken.
  HandOverTask& next_task(int64_t ahead = 0);
  void post();
  int64_t n_tasks() const { return static_cast<int64_t>(tasks_.size()); }
  // Tasks of an open step are posted before their kernels are launched: drain() and is_idle() leave them out.
  void open_step(int64_t n_tasks);
  void close_step();    // the step's tasks count as in flight from here on; the CPU workers rest after the last of them
  void abandon_step();  // like close_step(); tickets that have not arrived by now are lost
  bool is_idle() const {
    const uint64_t posted = posted_.load(std::memory_order_acquire), open_from = open_from_.load(std::memory_order_acquire);
    return finished_.load(std::memory_order_acquire) >= std::min(posted, open_from);
  }
  void drain();  // waits until is_idle()
  // Waits until the store has the rows of tokens before `end` that earlier calls of a layer append to a sequence.
  void wait_for_rows(int64_t sequence, int32_t layer_idx, int64_t end);
  bool is_settled() const { return is_idle() && !has_lost_.load(std::memory_order_acquire); }
  // Marks lost and unobserved tasks until forget_lost(). The ring is idle. An open step may lose more tasks later. The next
  // call marks those.
  void mark_lost();
  template <typename F>
  void for_marked(F note) const {
    if (!has_lost_.load(std::memory_order_acquire)) return;
    for (const HandOverTask& task : tasks_)
      if (task.rolls_back || task.moves_window_back) note(task);
  }
  void forget_lost();

 protected:
  ~TaskRing() = default;
  // For the device's thread. Returns the oldest unfinished task.
  HandOverTask& first_task() {
    return tasks_[static_cast<size_t>(finished_.load(std::memory_order_relaxed) % tasks_.size())];
  }
  bool has_posted() const { return finished_.load(std::memory_order_relaxed) != posted_.load(std::memory_order_acquire); }
  void finish_locked(HandOverTask& task);
  void restart_locked() { first_idx_ = posted_.load(std::memory_order_relaxed); }  // tickets restart at 0
  void note_lost() { has_lost_.store(true, std::memory_order_release); }
  bool is_abandoned(const HandOverTask& task) const { return task.idx >= abandoned_from_.load(std::memory_order_acquire); }

  Backend cpu_;
  mutable std::mutex mutex_;
  std::condition_variable changed_posted_, changed_finished_;
  uint64_t first_idx_ = 0;  // index of the task whose ticket is 0

 private:
  UnderWay& under_way_;
  std::vector<HandOverTask> tasks_;  // task i is at i % n_tasks
  std::atomic<uint64_t> posted_{0}, finished_{0}, open_from_{UINT64_MAX}, abandoned_from_{UINT64_MAX};
  std::atomic<bool> has_lost_{false};
};

}  // namespace tandem
