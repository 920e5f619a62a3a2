// SPDX-License-Identifier: MIT
#include "lib/attend/executor.h"

#include <chrono>
#include <mutex>
#include <shared_mutex>

#include "lib/attend/passage.h"
#include "lib/attend/session_states.h"
#include "lib/base/trace.h"

namespace tandem {

Status Executor::attend(const AttendArgs& args) {
  const auto start = std::chrono::steady_clock::now();
  const TraceRange range("call", args.layer_idx, args.on_device ? "on device tensors" : "on host tensors");
  Lane& lane = args.on_device ? static_cast<Lane&>(device_) : host_;
  Call call(core_, args, core_.scratch);
  bool was_launched = false;
  TANDEM_TRY(lane.start(call, &was_launched));
  if (!was_launched) TANDEM_TRY(run(lane, call));
  ++core_.sums.n_attends;
  core_.sums.n_device_attends += args.on_device;
  core_.sums.attend_ns +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
  return {};
}

Status Executor::run(Lane& lane, Call& call) {
  Passage passage(call);
  {
    // Calls on a device follow each other on the stream, so earlier calls of this session may still run.
    const auto lock = core_.cache->lock_settled(call.args.on_device ? core_.states : nullptr);
    if (call.args.on_device) TANDEM_TRY(core_.need_device());
    TANDEM_TRY(passage.enter());
  }
  if (call.calls().empty()) return {};
  TANDEM_TRY(lane.join(call));
  TANDEM_TRY(lane.reserve(call));
  Status status;
  try {
    for (ChunkPlace place; status.ok() && place.call < call.calls().size();) {
      Chunk chunk;
      status = lane.next_chunk(call, &place, &chunk);
      if (status.ok()) status = run_chunk(*chunk.work, *chunk.call);
    }
  } catch (...) {
    (void)lane.take_back(call, {});
    throw;
  }
  return status.ok() ? Status() : lane.take_back(call, std::move(status));
}

Status Executor::run_chunk(ChunkWork& work, Call& chunk) {
  std::shared_mutex& mutex = core_.cache->mutex();
  {
    std::unique_lock lock(mutex);
    TANDEM_TRY(work.prepare(chunk));
  }
  {
    std::shared_lock lock(mutex);
    TANDEM_TRY(work.fill(chunk));
  }
  TANDEM_TRY(work.launch(chunk));
  {
    std::unique_lock lock(mutex);
    TANDEM_TRY(work.commit(chunk));
  }
  work.finish(chunk);
  return {};
}

}  // namespace tandem
