// SPDX-License-Identifier: MIT
// The device thread's measurements of parts outside the window: sums for statistics, and times for the profile.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

#include "lib/device/task_ring.h"
#include "lib/rates/part_times.h"
#include "lib/rates/profile.h"

namespace tandem {

// The time when the pieces of a task had been sent, over all routes, as seen by the last look().
struct StreamEnd {
  std::array<uint8_t*, kMostRoutes> sent{};
  std::chrono::steady_clock::time_point seen;
  bool is_seen = false;

  bool is_awaited() const;
  void look();
};

struct TaskTimes {
  std::chrono::steady_clock::time_point begin, host_end;
  bool has_arrived = false, has_host = false;
  StreamEnd stream;
};

// Sums over finished tasks.
struct TaskSums {
  int64_t n_host_parts = 0, host_part_ns = 0, staged_kv_bytes = 0, selected_kv_bytes = 0, resident_kv_bytes = 0;
  int64_t n_stream_parts = 0, stream_part_ns = 0, streamed_kv_bytes = 0, streamed_x_bytes = 0;
  int64_t n_joint_parts = 0, host_part_tokens = 0, stream_part_tokens = 0;
  int64_t n_planned_parts = 0, planned_part_ns = 0, predicted_part_ns = 0;
};

class PartLearner {
 public:
  explicit PartLearner(Profile& profile) : profile_(profile) {}

  // Records a finished task. The ring's mutex is held. learns: the profile may learn from its times.
  void learn(const HandOverTask& task, const TaskTimes& times, bool learns);
  TaskSums& sums() { return sums_; }
  const TaskSums& sums() const { return sums_; }
  double bus_ahead_ns(int32_t layer_idx, int64_t n_queries) const { return part_times_.ahead_ns(layer_idx, n_queries); }
  // For the device's thread, while learn() does not run. Checks whether the last part's states are merged.
  void look_at_merged();
  void note_merged();  // the next part's queries have arrived: the last part's time is known
  void forget_merged() { unmerged_ = {}; }

 private:
  // The last part whose keys the device made, until its states are merged. The next ticket arrives after that, so the thread
  // can watch for both.
  struct Unmerged {
    uint8_t* flag = nullptr;
    uint8_t mark = 0;  // value of the flag once it is set
    std::chrono::steady_clock::time_point begin, looked, merged;
    bool is_merged = false;
    const Layer* layer = nullptr;
    RebuiltTimes times;
  };
  PartReading read_times(const HandOverTask& task, const TaskTimes& times);
  void await_merged(const HandOverTask& task, const TaskTimes& times, const PartReading& reading);
  void add_sums(const HandOverTask& task, const TaskTimes& times, const PartReading& reading);

  Profile& profile_;
  TaskSums sums_;
  PartTimes part_times_;
  Unmerged unmerged_;
  std::chrono::steady_clock::time_point long_began_;  // start of the last long append's attention
};

}  // namespace tandem
