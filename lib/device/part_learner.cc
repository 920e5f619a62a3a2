// SPDX-License-Identifier: MIT
#include "lib/device/part_learner.h"

#include <algorithm>
#include <atomic>
#include <new>

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

// Gap between the end of a part with made keys and the arrival of the next part's queries. A gap shorter than kInRow is only
// the time that the queries take to arrive. Beside products that time is kAsked, which replaces longer gaps.
constexpr std::chrono::microseconds kInRow(300), kAsked(50);
constexpr std::chrono::microseconds kLooked(100);  // after a longer pause between two looks, the time of an event is unknown

double ns_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::nano>(end - begin).count();
}

}  // namespace

bool StreamEnd::is_awaited() const {
  return std::any_of(sent.begin(), sent.end(), [](const uint8_t* flag) { return flag != nullptr; });
}

void StreamEnd::look() {
  const auto is_set = [](uint8_t* flag) {
    return flag == nullptr || std::atomic_ref(*flag).load(std::memory_order_acquire) != 0;
  };
  if (is_seen || !is_awaited() || !std::all_of(sent.begin(), sent.end(), is_set)) return;
  is_seen = true;
  seen = Clock::now();
}

PartReading PartLearner::read_times(const HandOverTask& task, const TaskTimes& times) {
  const auto ns = [](Clock::time_point at) { return ns_between({}, at); };
  PartMoments part;
  part.layer_idx = task.shape.layer_idx;
  part.n_queries = task.shape.max_q_len;
  part.asked = ns(task.step > 0 ? times.begin : task.asked);  // planned steps request no copies
  part.arrived = ns(times.begin);
  part.has_host = times.has_host;
  part.host_end = ns(times.host_end);
  part.has_stream = times.stream.is_seen;
  part.is_rows = task.part.is_rows;
  part.n_pieces = task.part.n_pieces;
  part.streamed = ns(times.stream.seen);
  if (times.has_arrived) try {
      return part_times_.note(part);
    } catch (const std::bad_alloc&) {  // the next part will be recorded
    }
  PartReading reading;
  reading.host = reading.total = times.has_host ? part.host_end - part.arrived : 0.0;
  return reading;
}

void PartLearner::await_merged(const HandOverTask& task, const TaskTimes& times, const PartReading& reading) {
  unmerged_ = {};
  if (task.merged == nullptr || !task.part.tells || !times.stream.is_seen) return;
  const bool is_alone = !times.has_host && task.part.streamed_tokens == 0;
  unmerged_.flag = task.merged;
  unmerged_.mark = task.merged_mark;
  unmerged_.begin = times.begin;
  unmerged_.looked = Clock::now();
  unmerged_.layer = task.part.layer;
  unmerged_.times = {is_alone ? task.part.x_bytes : 0,
                     task.part.n_made_rows,
                     reading.bus,
                     reading.late,
                     reading.host,
                     0.0,
                     reading.is_steady};
}

// A result that is seen after a pause of more than kLooked is dropped, as its time is unknown.
void PartLearner::look_at_merged() {
  if (unmerged_.flag == nullptr || unmerged_.is_merged) return;
  const auto now = Clock::now();
  unmerged_.is_merged = std::atomic_ref(*unmerged_.flag).load(std::memory_order_acquire) == unmerged_.mark;
  if (unmerged_.is_merged && now - unmerged_.looked > kLooked) unmerged_ = {};
  unmerged_.merged = unmerged_.looked = now;
}

// If the next part follows closely, the gap is the time that its queries take to arrive, and counts as this part's.
void PartLearner::note_merged() {
  if (!unmerged_.is_merged) return;
  const auto between = Clock::now() - unmerged_.merged;
  unmerged_.times.total_ns = ns_between(unmerged_.begin, unmerged_.merged) +
                             static_cast<double>(std::chrono::nanoseconds(between < kInRow ? between : kAsked).count());
  profile_.note_rebuilt(*unmerged_.layer, unmerged_.times);
  unmerged_ = {};
}

void PartLearner::add_sums(const HandOverTask& task, const TaskTimes& times, const PartReading& reading) {
  const HandOverPart& part = task.part;
  if (times.has_host) {
    ++sums_.n_host_parts;
    sums_.host_part_ns += static_cast<int64_t>(reading.host);
    sums_.host_part_tokens += part.host_tokens;
  }
  if (times.has_arrived) {
    sums_.selected_kv_bytes += task.scratch.host.read().host;
    sums_.resident_kv_bytes += task.scratch.host.read().resident;
  }
  if (!times.stream.is_seen) return;
  ++sums_.n_stream_parts;
  sums_.stream_part_ns += static_cast<int64_t>(reading.bus);
  sums_.stream_part_tokens += part.streamed_tokens;
  sums_.streamed_kv_bytes += part.streamed_tokens * part.key_bytes;
  sums_.streamed_x_bytes += part.x_bytes;
  sums_.n_joint_parts += times.has_host;
}

void PartLearner::learn(const HandOverTask& task, const TaskTimes& times, bool learns) {
  const HandOverPart& part = task.part;
  const PartReading reading = read_times(task, times);
  await_merged(task, times, reading);
  add_sums(task, times, reading);
  if (part.begins_long) long_began_ = times.begin;
  if (part.expected_ns > 0.0 && times.stream.is_seen)
    profile_.note_prefill(*part.layer, part.tile_ns, part.expected_ns,
                          ns_between(long_began_, times.stream.seen) - part.fixed_ns);
  const bool has_keys = part.streamed_tokens > 0, has_streamed = has_keys || part.x_bytes > 0;
  if (!part.tells || has_streamed != times.stream.is_seen || !learns) return;
  const int64_t bus_bytes = part.streamed_tokens * part.key_bytes + profile_.as_keys(*part.layer, part.x_bytes);
  const JointPart joint = {part.n_queries, part.weighed_keys, reading.host,     bus_bytes,
                           reading.late,   reading.ahead,     part.ahead_bytes, part.bus_tells};
  if (times.has_host && !has_streamed)
    profile_.note_host(*part.layer, part.n_queries, part.weighed_keys, reading.host);
  else if (times.has_host && reading.late == 0.0)
    profile_.note_ahead(*part.layer, joint);
  else if (times.has_host && (reading.is_steady || !part.bus_tells))
    profile_.note_joint(*part.layer, joint);
  if (has_keys && !times.has_host && reading.late > 0.0 && reading.is_steady && part.bus_tells)
    profile_.note_bus(bus_bytes, reading.bus);
  else if (has_keys)
    profile_.note_bus_at_most(bus_bytes, reading.bus);
  if (part.keeps_hidden) profile_.note_not_rebuilt(*part.layer);
  if (has_streamed && !times.has_host) profile_.note_idle_host(*part.layer, part.n_queries);
  if (part.predicted_ns == 0.0 || !part.bus_tells) return;
  ++sums_.n_planned_parts;
  sums_.predicted_part_ns += static_cast<int64_t>(part.predicted_ns);
  sums_.planned_part_ns += static_cast<int64_t>(reading.total);
}

}  // namespace tandem
