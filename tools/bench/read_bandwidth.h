// SPDX-License-Identifier: MIT
// Measures the memory bandwidth of threads that only read.
//
// It is the limit of decode, so it must not be measured too low. Every thread is bound to a core and reads its own part of a
// buffer several times as large as the last-level cache. The buffer is placed by first touch, on huge pages, and read in
// chunks of 1 MiB. A thread that has finished takes chunks of other threads, so a thread that loses its core for a while
// does not decide the pass. Within a chunk several streams are read at once, with or without prefetches. The fastest of
// these ways differs between machines. So calibration tries all of them in turns and keeps the best.
#pragma once

#include <cstdint>
#include <memory>

#include "tools/bench/pinned_team.h"
#include "tools/common/result.h"

namespace tools {

class ReadBandwidth {
 public:
  // buffer_bytes is rounded up to whole chunks for each thread.
  static Result create(PinnedTeam* team, int64_t buffer_bytes, std::unique_ptr<ReadBandwidth>* probe);
  ~ReadBandwidth();
  ReadBandwidth(const ReadBandwidth&) = delete;
  ReadBandwidth& operator=(const ReadBandwidth&) = delete;

  double measure();  // GB/s of one pass, read in the best way
  const char* best_way() const;
  int64_t buffer_bytes() const { return buffer_bytes_; }

 private:
  explicit ReadBandwidth(PinnedTeam* team) : team_(team), next_chunk_(static_cast<size_t>(team->size())) {}
  void first_touch();
  void calibrate();
  double pass(int32_t way_idx);

  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  PinnedTeam* team_;
  char* buffer_ = nullptr;
  int64_t buffer_bytes_ = 0;
  int64_t chunks_per_thread_ = 0;
  std::vector<Counter> next_chunk_;    // chunks of each thread's part
  std::atomic<uint64_t> checksum_{0};  // keeps the compiler from dropping the reads
  int32_t best_way_ = 0;
};

}  // namespace tools
