// SPDX-License-Identifier: MIT
#include "lib/device/task_ring.h"

#include <utility>

namespace tandem {

HandOverTask& TaskRing::next_task(int64_t ahead) {
  const uint64_t idx = posted_.load(std::memory_order_relaxed) + static_cast<uint64_t>(ahead);
  const auto is_free = [&] { return idx - finished_.load(std::memory_order_acquire) < tasks_.size(); };
  if (!is_free()) {
    std::unique_lock lock(mutex_);
    changed_finished_.wait(lock, is_free);
  }
  HandOverTask& task = tasks_[static_cast<size_t>(idx % tasks_.size())];
  task.idx = idx;
  task.ticket = idx - first_idx_;
  return task;
}

void TaskRing::post() {
  {
    std::lock_guard lock(mutex_);
    under_way_.add(1);
    posted_.fetch_add(1, std::memory_order_release);
  }
  changed_posted_.notify_one();
}

void TaskRing::open_step(int64_t n_tasks) {
  {
    std::lock_guard lock(mutex_);
    open_from_.store(posted_.load(std::memory_order_relaxed), std::memory_order_release);
    posted_.fetch_add(static_cast<uint64_t>(n_tasks), std::memory_order_release);
  }
  changed_posted_.notify_one();
}

// The rest of the step counts as in flight from here on. It may not have begun, but workers that slept until its parts
// arrive would be late for each part.
void TaskRing::close_step() {
  std::lock_guard lock(mutex_);
  const uint64_t posted = posted_.load(std::memory_order_relaxed), finished = finished_.load(std::memory_order_relaxed);
  under_way_.add(static_cast<int64_t>(posted - std::max(finished, open_from_.load())));
  if (finished < posted)
    tasks_[static_cast<size_t>((posted - 1) % tasks_.size())].is_last = true;
  else
    cpu_.table->rest(cpu_.self);
  open_from_.store(UINT64_MAX, std::memory_order_release);
}

void TaskRing::abandon_step() {
  abandoned_from_.store(open_from_.load(std::memory_order_acquire), std::memory_order_release);
  close_step();
}

void TaskRing::drain() {
  std::unique_lock lock(mutex_);
  changed_finished_.wait(lock, [&] { return is_idle(); });
}

void TaskRing::wait_for_rows(int64_t sequence, int32_t layer_idx, int64_t end) {
  const uint64_t posted = posted_.load(std::memory_order_relaxed);
  for (uint64_t idx = posted; idx > finished_.load(std::memory_order_acquire);) {
    HandOverTask& task = tasks_[static_cast<size_t>(--idx % tasks_.size())];
    if (task.shape.layer_idx != layer_idx || (task.copied_bytes == 0 && !task.scratch.host.rows().any())) continue;
    const bool has_some = std::any_of(task.touched().begin(), task.touched().end(), [&](const TouchedSequence& one) {
      return one.sequence == sequence && one.length < end;
    });
    if (!has_some) continue;
    std::unique_lock lock(mutex_);
    return changed_finished_.wait(lock, [&] { return finished_.load(std::memory_order_acquire) > idx; });
  }
}

// Frees the task's place for a waiting thread. The mutex is held.
void TaskRing::finish_locked(HandOverTask& task) {
  const uint64_t idx = task.idx;
  const bool is_last = std::exchange(task.is_last, false);
  finished_.store(idx + 1, std::memory_order_release);
  if (is_last) cpu_.table->rest(cpu_.self);
  if (idx < open_from_.load(std::memory_order_relaxed)) under_way_.add(-1);
}

void TaskRing::mark_lost() {
  if (!has_lost_.load(std::memory_order_acquire)) return;
  for (HandOverTask& task : tasks_) {
    if (task.is_lost.exchange(false)) task.rolls_back = true;
    if (task.is_unseen.exchange(false)) task.moves_window_back = true;
  }
}

void TaskRing::forget_lost() {
  if (!has_lost_.exchange(false, std::memory_order_acq_rel)) return;
  for (HandOverTask& task : tasks_) {
    task.rolls_back = task.moves_window_back = false;
    if (task.is_lost || task.is_unseen) has_lost_ = true;  // lost after mark_lost()
  }
}

}  // namespace tandem
