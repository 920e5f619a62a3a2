// SPDX-License-Identifier: MIT
// The host's side of calls on device tensors: a thread that waits for each ticket to arrive (lib/device.h has the protocol),
// takes its rows into the store, attends to the keys outside the window on the CPU's pool, and answers.
//
// A task says what to do about a ticket. It is complete when it is posted: it holds addresses and nothing that later calls
// change, so the thread takes no lock of the cache's. Tasks are answered in the order of posting.
//
// What goes wrong is a fault. Of a device that is lost it is for good. A step that was not done as planned, and a lack of
// memory on the thread, are got over: that task and all behind it are lost, whether they arrive or not, and taken back by
// who looks next; nobody waits for their answers; and when the device has done with them tickets begin again. For lack of
// memory the device does all the same what it was asked for, and a task ends when it has; of a step nobody knows what comes.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "lib/attend_scratch.h"
#include "lib/device_owner.h"
#include "lib/page_store.h"
#include "lib/routes/key_route.h"
#include "lib/routes/part_times.h"
#include "lib/routes/profile.h"
#include "lib/ticket.h"
#include "lib/under_way.h"

namespace tandem {

// A sequence before a call: what it is again, in the call's layer, when the ticket never arrives. What arrived and was not
// observed leaves keys that nobody has judged: the window begins again where it did.
struct TouchedSequence {
  int64_t sequence = 0;
  int64_t length = 0;
  int64_t window_begin = 0;
};

// The keys outside the window, of calls that could stream: who has them, and what is to be learned from it.
struct HandOverPart {
  const Layer* layer = nullptr;
  int64_t key_bytes = 0;  // of a token, in all KV heads
  int64_t host_tokens = 0, streamed_tokens = 0;
  int64_t n_queries = 0;      // the most of a sequence
  int64_t weighed_keys = 0;   // the CPU's, if all were under so many
  int64_t ahead_bytes = 0;    // that buffers have room for before the queries come
  bool tells = false;         // there are enough of them
  bool bus_tells = true;      // false: the device makes keys of what it brings, more slowly than that comes
  bool keeps_hidden = false;  // the plan might have had keys made of hidden states, and has none
  int64_t n_pieces = 0;       // that cross the bus, of all routes
  int64_t x_bytes = 0;        // of hidden states that cross the bus
  int64_t n_made_rows = 0;    // of keys that the device makes of them
  bool is_rows = false;       // of a long append, whose queries do not come with its tickets
  double predicted_ns = 0.0;  // 0: nobody knew
  // Of a long append: its first rows, which come when its queries are there; what is to be learned of its pieces: from then
  // until the last one has crossed the bus it takes fixed_ns and, where a tile takes tile_ns, expected_ns. 0: nothing.
  bool begins_long = false;
  double tile_ns = 0.0, expected_ns = 0.0, fixed_ns = 0.0;
};

struct HandOverTask {
  uint64_t idx = 0;     // of all tasks
  uint64_t ticket = 0;  // as the device counts
  TicketShape shape;
  const SlotHeader* header = nullptr;
  uint64_t step = 0;  // that it is a planned part of, counted from 1; 0: none
  std::vector<TouchedSequence> touched;
  AttendScratch scratch;
  // Keys that the device gets of the host while the task is under way: so long nobody may change them.
  std::array<std::unique_ptr<RouteNotes>, kMostRoutes> notes;
  std::array<size_t, kMostRoutes> n_pieces{};
  std::array<uint8_t*, kMostRoutes> sent{};  // 1: all of a route's pieces have left the host; null: there are none
  std::vector<std::byte*> bases;             // of the store's extents, where they are
  std::vector<Launch> launches;              // behind the window
  uint8_t* merged = nullptr;                 // merged_mark: the call's states are one; null: nobody says so
  uint8_t merged_mark = 0;  // another one than that of the task before in this place, whose comes when that is done with
  std::chrono::steady_clock::time_point asked;  // the call was about to ask for copies, if there are any
  HandOverPart part;
  std::atomic<bool> is_lost{false};                    // it never arrived
  std::atomic<bool> is_unseen{false};                  // it arrived and was not observed
  std::atomic<bool> is_cut{false};                     // what was to come after its arrival was not launched
  bool rolls_back = false, moves_window_back = false;  // it was the one or the other; guarded by the cache's mutex
  bool is_last = false;                                // of a step that is closed; guarded by the hand-over's mutex

  int32_t step_tag() const { return static_cast<int32_t>(step & 0x7fffffff); }
  bool is_its_own() const { return shape.is_served_by(*header) && header->step == step_tag(); }  // what has arrived
};

class HandOver {
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

  // Flags that the device has written nothing to yet; tickets begin with 0. Nothing is under way; those of before are there.
  void restart(ExchangeFlags* flags);
  // The same flags from the beginning, and no fault any more. Nothing is under way here or on the device.
  void start_over();
  // The task of the next ticket, or of one behind it, to be filled and posted; waits while its place is taken.
  HandOverTask& next_task(int64_t ahead = 0);
  void post();
  int64_t n_tasks() const { return static_cast<int64_t>(tasks_.size()); }
  // While a step is open that has posted tasks and may not have launched anything yet, nobody waits for these.
  void open_step(int64_t n_tasks);
  void close_step();    // the workers, awake since it began, rest when the last of these is done
  void abandon_step();  // likewise; what has not arrived by now is lost
  bool is_idle() const {
    const uint64_t posted = posted_.load(std::memory_order_acquire), open_from = open_from_.load(std::memory_order_acquire);
    return finished_.load(std::memory_order_acquire) >= std::min(posted, open_from);
  }
  void drain();  // until it is idle
  // Until the store has the rows of tokens before `end` that earlier calls of a layer append to a sequence.
  void wait_for_rows(int64_t sequence, int32_t layer_idx, int64_t end);
  // Sums of tasks that are done.
  struct Sums {
    int64_t n_host_parts = 0, host_part_ns = 0, staged_kv_bytes = 0, selected_kv_bytes = 0;
    int64_t n_stream_parts = 0, stream_part_ns = 0, streamed_kv_bytes = 0, streamed_x_bytes = 0;
    int64_t n_joint_parts = 0, host_part_tokens = 0, stream_part_tokens = 0;
    int64_t n_planned_parts = 0, planned_part_ns = 0, predicted_part_ns = 0;
  };
  Sums sums() const;
  double bus_ahead_ns(int32_t layer_idx, int64_t n_queries) const;  // lib/routes/part_times.h
  bool is_settled() const { return is_idle() && !has_lost_.load(std::memory_order_acquire); }
  // Why no ticket will arrive any more; ok as long as they do.
  Status fault();
  // The fault is of a step, or of memory: the device is well.
  bool can_start_over() const { return can_start_over_.load(std::memory_order_acquire); }
  // Tasks that never arrived or were not observed by now are marked until forget_lost(); it is idle. Of a step that is open
  // more may be lost at any time: they wait to be marked.
  void mark_lost() {
    if (!has_lost_.load(std::memory_order_acquire)) return;
    for (HandOverTask& task : tasks_) {
      if (task.is_lost.exchange(false)) task.rolls_back = true;
      if (task.is_unseen.exchange(false)) task.moves_window_back = true;
    }
  }
  template <typename F>
  void for_marked(F note) const {
    if (!has_lost_.load(std::memory_order_acquire)) return;
    for (const HandOverTask& task : tasks_)
      if (task.rolls_back || task.moves_window_back) note(task);
  }
  void forget_lost() {
    if (!has_lost_.exchange(false, std::memory_order_acq_rel)) return;
    for (HandOverTask& task : tasks_) {
      task.rolls_back = task.moves_window_back = false;
      if (task.is_lost || task.is_unseen) has_lost_ = true;  // since then
    }
  }

 private:
  HandOver(const Device& device, const Backend& cpu, int64_t n_tasks, const Counters& counters)
      : device_(device),
        cpu_(cpu),
        under_way_(*counters.under_way),
        profile_(*counters.profile),
        tasks_(static_cast<size_t>(n_tasks)) {}
  void loop();
  bool wait_for_post();
  bool is_of_step() const;  // the fault
  bool is_hopeless() const { return faulted_.load(std::memory_order_acquire) && !can_start_over(); }
  template <typename F>
  bool wait_for(F has_come);
  // When the pieces of a task had been sent, of all routes, as far as somebody has looked.
  struct StreamEnd {
    std::array<uint8_t*, kMostRoutes> sent{};
    std::chrono::steady_clock::time_point seen;
    bool is_seen = false;

    bool is_awaited() const {
      return std::any_of(sent.begin(), sent.end(), [](const uint8_t* flag) { return flag != nullptr; });
    }
    void look();
  };
  bool wait_for_arrival(const HandOverTask& task, StreamEnd* stream);
  bool wait_for_observation(const HandOverTask& task);
  static int32_t look_at_stream(int64_t done, int64_t total, void* end);
  void wait_for_stream(const HandOverTask& task, StreamEnd* end);
  struct TaskTimes {
    std::chrono::steady_clock::time_point begin, host_end;
    bool has_arrived = false, has_host = false;
    StreamEnd stream;
  };
  // The last part whose keys were made on the device, until its states are one: behind that the next one arrives, for which
  // this thread waits, and sees both.
  struct Unmerged {
    uint8_t* flag = nullptr;
    uint8_t mark = 0;  // what it is then
    std::chrono::steady_clock::time_point begin, looked, merged;
    bool is_merged = false;
    const Layer* layer = nullptr;
    RebuiltTimes times;
  };
  void await_merged(const HandOverTask& task, const TaskTimes& times, const PartReading& reading);
  void look_at_merged();
  void note_merged();  // and now the next part's queries are there
  PartReading read_times(const HandOverTask& task, const TaskTimes& times);
  void learn(const HandOverTask& task, const TaskTimes& times);
  void lose(HandOverTask* task);
  void finish(HandOverTask& task, const TaskTimes& times, int64_t staged_bytes);
  template <typename F>
  void while_busy(const char* no_memory, F action);
  void check_device();
  void check_flags();
  bool is_over(const HandOverTask& task) const;
  bool is_abandoned(const HandOverTask& task) const { return task.idx >= abandoned_from_.load(std::memory_order_acquire); }
  void fault_of_step(const HandOverTask& task);
  void answer(const HandOverTask& task);
  void attend(HostPart& part, StreamEnd* stream);
  void set_fault(int32_t code, int64_t underlying, const char* text);

  const Device& device_;
  Backend cpu_;
  UnderWay& under_way_;
  Profile& profile_;
  ExchangeFlags* flags_ = nullptr;
  uint64_t first_idx_ = 0;           // of the task whose ticket is 0
  std::vector<HandOverTask> tasks_;  // of index i: i % n_tasks
  std::atomic<uint64_t> posted_{0}, finished_{0}, open_from_{UINT64_MAX}, abandoned_from_{UINT64_MAX};
  std::atomic<bool> faulted_{false}, can_start_over_{false}, has_lost_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_posted_, changed_finished_;
  std::atomic<int32_t> fault_code_{TANDEM_OK};
  int64_t fault_underlying_ = 0;  // guarded by mutex_, as what follows
  char fault_text_[256] = "";
  Sums sums_;
  PartTimes part_times_;
  Unmerged unmerged_;                                 // the thread's, while a task is under way
  std::chrono::steady_clock::time_point long_began_;  // the device thread's: the last long append's attention
  std::atomic<bool> stop_{false}, retires_{false};
  void (*end_)(void* context) = nullptr;  // before retires_ is set, as what follows
  void* end_context_ = nullptr;
  std::thread thread_;
};

}  // namespace tandem
