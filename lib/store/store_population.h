// SPDX-License-Identifier: MIT
// Has the kernel give extents of the store their memory before rows are written there.
//
// The first write to a huge page waits until the kernel has cleared its 2 MiB: some 0.5 ms on an H100's host. A token's rows
// of a layer lie in several huge pages (in four, for 8 KV heads of 128 dims in bf16), and so in every layer. A token that
// begins an extent would pay for all of them. So an append to a sequence that has reserved pages asks for the extent that
// the tokens behind its own will need, and the engine's background thread has the kernel clear it meanwhile, slice by slice,
// so that the thread's other jobs have their turn between two slices. Only an extent that the sequence has pages of is asked
// for: memory that is reserved, far from what is used, stays uncommitted.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "lib/machine/worker.h"

namespace tandem {

class StorePopulation {
 public:
  explicit StorePopulation(Worker& worker);
  ~StorePopulation();  // waits for the slice that the thread is at
  StorePopulation(const StorePopulation&) = delete;

  // There are n extents from now on, numbered from 0.
  void grow(size_t n);
  // An extent's memory, a mapping of the library's own. The first time that an extent is asked for counts. Never fails:
  // where the kernel is too old (before Linux 5.14), the first write waits as before.
  void ask(size_t extent, std::byte* data, int64_t bytes);
  // The extent's memory is about to go: waits for the slice of it that the thread is at. It may be asked for again.
  void forget(size_t extent, const std::byte* data, int64_t bytes);

 private:
  struct Stretch {
    std::byte* data;
    int64_t bytes;
  };
  void populate_next();

  Worker& worker_;
  Job job_;
  std::vector<bool> is_asked_;      // [n extents], the caller's alone, who asks under the cache's mutex
  std::mutex mutex_;                // guards what follows
  std::vector<Stretch> stretches_;  // still to be populated, the last first; has capacity for all extents
  std::condition_variable changed_;
  const std::byte* at_work_ = nullptr;  // the slice that the thread is at
  bool stops_ = false;
};

}  // namespace tandem
