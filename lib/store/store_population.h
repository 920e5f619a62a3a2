// SPDX-License-Identifier: MIT
// Makes the kernel commit the memory of the store's extents before rows are written to them.
//
// The first write to a huge page waits until the kernel has cleared its 2 MiB: about 0.5 ms on an H100's host. A token's
// rows of a layer lie in several huge pages (four for 8 KV heads of 128 dims in bf16), and every layer has its own. A token
// that begins an extent would pay for all of them. So an append to a sequence with reserved pages asks for the extent that
// later tokens will need. The engine's background thread then has the kernel clear that memory slice by slice, so that the
// thread's other jobs can run between slices. Only extents in which the sequence has pages are asked for. Reserved memory
// far from the used part stays uncommitted.
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
  ~StorePopulation();  // waits for the thread's current slice
  StorePopulation(const StorePopulation&) = delete;

  // From now on there are n extents, numbered from 0.
  void grow(size_t n);
  // Asks for an extent's memory, which must be a mapping of the library's own. Only the first request for an extent counts.
  // Never fails: if the kernel is older than Linux 5.14, the first write waits as before.
  void ask(size_t extent, std::byte* data, int64_t bytes);
  // Waits for the slice of the extent that the thread is clearing, as the memory is about to be freed. The extent may be
  // asked for again.
  void forget(size_t extent, const std::byte* data, int64_t bytes);

 private:
  struct Stretch {
    std::byte* data;
    int64_t bytes;
  };
  void populate_next();

  Worker& worker_;
  Job job_;
  std::vector<bool> is_asked_;      // [n extents]; only callers use it, under the cache's mutex
  std::mutex mutex_;                // guards the members below
  std::vector<Stretch> stretches_;  // not populated yet, the last one is next; has capacity for all extents
  std::condition_variable changed_;
  const std::byte* at_work_ = nullptr;  // the slice that the thread is clearing
  bool stops_ = false;
};

}  // namespace tandem
