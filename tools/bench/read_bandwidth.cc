// SPDX-License-Identifier: MIT
#include "tools/bench/read_bandwidth.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace tools {
namespace {

// One copy per vector width, chosen when the program is loaded. ThreadSanitizer starts only after that and would crash, so
// it gets no copies.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define TOOLS_BEST_VECTORS [[gnu::target_clones("avx512f", "avx2", "default")]]
#else
#define TOOLS_BEST_VECTORS
#endif

constexpr int64_t kChunkBytes = INT64_C(1) << 20;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kCalibrationPasses = 5;

using Line [[gnu::vector_size(kLineBytes)]] = uint64_t;

// Reads kStreams parts of the chunk, two lines of each in turn. kAhead: lines prefetched ahead; 0: none. The prefetches skip
// all caches but the first if the processor can do that.
template <int32_t kStreams, int64_t kAhead>
[[gnu::always_inline]] inline void read_streams(const Line* chunk, Line* sum) {
  constexpr int64_t kLines = kChunkBytes / kLineBytes / kStreams;
  Line sums[kStreams];
  std::memset(sums, 0, sizeof sums);
  for (int64_t i = 0; i < kLines; i += 2) {
    for (int32_t s = 0; s < kStreams; ++s) {
      const Line* line = chunk + s * kLines + i;
      if (kAhead > 0) {
        __builtin_prefetch(line + kAhead, 0, 0);
        __builtin_prefetch(line + kAhead + 1, 0, 0);
      }
      sums[s] += line[0];
      sums[s] ^= line[1];
    }
  }
  for (int32_t s = 0; s < kStreams; ++s) *sum += sums[s];
}

// Reads in order. Meanwhile prefetches 4 pages of 4 KiB, 16 KiB ahead, a line of each in turn. The second-level cache's
// prefetcher follows all four.
[[gnu::always_inline]] inline void read_pages(const Line* chunk, Line* sum) {
  constexpr int64_t kPageLines = 4096 / kLineBytes, kPages = 4, kGroupLines = kPages * kPageLines;
  Line sums[kPages] = {};
  for (const Line* group = chunk; group < chunk + kChunkBytes / kLineBytes; group += kGroupLines) {
    for (int64_t i = 0; i < kPageLines; ++i) {
      for (int64_t s = 0; s < kPages; ++s) {
        __builtin_prefetch(group + kGroupLines + s * kPageLines + i, 0, 3);
        sums[s] += group[i * kPages + s];
      }
    }
  }
  for (const Line& part : sums) *sum += part;
}

TOOLS_BEST_VECTORS void read_4_pages(const Line* chunk, Line* sum) { read_pages(chunk, sum); }
TOOLS_BEST_VECTORS void read_1(const Line* chunk, Line* sum) { read_streams<1, 0>(chunk, sum); }
TOOLS_BEST_VECTORS void read_4(const Line* chunk, Line* sum) { read_streams<4, 0>(chunk, sum); }
TOOLS_BEST_VECTORS void read_1_ahead_64(const Line* chunk, Line* sum) { read_streams<1, 64>(chunk, sum); }
TOOLS_BEST_VECTORS void read_2_ahead_32(const Line* chunk, Line* sum) { read_streams<2, 32>(chunk, sum); }
TOOLS_BEST_VECTORS void read_4_ahead_16(const Line* chunk, Line* sum) { read_streams<4, 16>(chunk, sum); }
TOOLS_BEST_VECTORS void read_8_ahead_16(const Line* chunk, Line* sum) { read_streams<8, 16>(chunk, sum); }

struct Way {
  const char* name;
  void (*read)(const Line* chunk, Line* sum);
};
constexpr Way kWays[] = {
    {"4 streams, prefetched 1 KiB ahead", read_4_ahead_16},
    {"8 streams, prefetched 1 KiB ahead", read_8_ahead_16},
    {"2 streams, prefetched 2 KiB ahead", read_2_ahead_32},
    {"1 stream, prefetched 4 KiB ahead", read_1_ahead_64},
    {"4 pages prefetched in turn", read_4_pages},
    {"4 streams", read_4},
    {"1 stream", read_1},
};

}  // namespace

Result ReadBandwidth::create(PinnedTeam* team, int64_t buffer_bytes, std::unique_ptr<ReadBandwidth>* probe) {
  std::unique_ptr<ReadBandwidth> made(new ReadBandwidth(team));
  const int64_t n_threads = team->size();
  made->chunks_per_thread_ = (buffer_bytes + n_threads * kChunkBytes - 1) / (n_threads * kChunkBytes);
  made->buffer_bytes_ = made->chunks_per_thread_ * n_threads * kChunkBytes;
  void* memory =
      mmap(nullptr, static_cast<size_t>(made->buffer_bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    return refuse("no memory for the read bandwidth probe (%lld MiB): %s", static_cast<long long>(made->buffer_bytes_ >> 20),
                  std::strerror(errno));
  made->buffer_ = static_cast<char*>(memory);
  madvise(memory, static_cast<size_t>(made->buffer_bytes_), MADV_HUGEPAGE);
  made->first_touch();
  made->calibrate();
  *probe = std::move(made);
  return {};
}

ReadBandwidth::~ReadBandwidth() {
  if (buffer_) munmap(buffer_, static_cast<size_t>(buffer_bytes_));
}

const char* ReadBandwidth::best_way() const { return kWays[best_way_].name; }

double ReadBandwidth::measure() { return pass(best_way_); }

// Writes the pages. Pages that are only read would all be the one page of zeros.
void ReadBandwidth::first_touch() {
  const int64_t part_bytes = chunks_per_thread_ * kChunkBytes;
  team_->run([&](int32_t thread_idx) {
    std::memset(buffer_ + thread_idx * part_bytes, 1 + thread_idx, static_cast<size_t>(part_bytes));
  });
}

void ReadBandwidth::calibrate() {
  constexpr int32_t kNWays = static_cast<int32_t>(std::size(kWays));
  std::vector<double> gbps[kNWays];
  for (int64_t i = 0; i < kCalibrationPasses; ++i)
    for (int32_t way_idx = 0; way_idx < kNWays; ++way_idx) gbps[way_idx].push_back(pass(way_idx));
  double best = 0;
  for (int32_t way_idx = 0; way_idx < kNWays; ++way_idx) {
    std::nth_element(gbps[way_idx].begin(), gbps[way_idx].begin() + kCalibrationPasses / 2, gbps[way_idx].end());
    const double median = gbps[way_idx][kCalibrationPasses / 2];
    if (median > best) best_way_ = way_idx;
    best = std::max(best, median);
  }
}

double ReadBandwidth::pass(int32_t way_idx) {
  for (Counter& counter : next_chunk_) counter.value = 0;
  const double seconds = team_->run([&](int32_t thread_idx) {
    Line sum = {};
    const int32_t n_threads = team_->size();
    for (int32_t i = 0; i < n_threads; ++i) {
      const int32_t part = (thread_idx + i) % n_threads;
      std::atomic<int64_t>& next = next_chunk_[static_cast<size_t>(part)].value;
      for (int64_t chunk; (chunk = next.fetch_add(1)) < chunks_per_thread_;)
        kWays[way_idx].read(reinterpret_cast<const Line*>(buffer_ + (part * chunks_per_thread_ + chunk) * kChunkBytes),
                            &sum);
    }
    checksum_ += sum[0] ^ sum[7];
  });
  return static_cast<double>(buffer_bytes_) / seconds * 1e-9;
}

}  // namespace tools
