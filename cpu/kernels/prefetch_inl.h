// SPDX-License-Identifier: MIT
// Chooses the lines to prefetch while rows are computed, and their order.
//
// A core has 10 to 16 places for lines on their way to its first-level cache. At 100 ns each these carry less than the core
// could read, so the prefetcher of the second level must bring the rest. That prefetcher follows sequences of lines within a
// page of 4 KiB and runs some 20 lines ahead in each. Rows prefetched one after another would keep it busy in only one page.
// So rows are prefetched in kStreams streams, a page apart, a line of each in turn, one group of rows ahead of the group
// being computed:
//
//   computing rows   g ... g + 4 apart       tile 0          tile 1          tile 2
//   prefetching      stream 0, page 0        row g'          row g' + 1      row g' + 2       g' = g + 4 apart
//                    stream 1, page 1        row g' + apart  ...
//                    stream 2, page 2
//                    stream 3, page 3
//
// Measured on a Xeon of the Sapphire Rapids family, two threads: 27 GB/s, against 21 for one sequence and 18 without.
//
// Rows that do not lie side by side have no pages to run through. They are prefetched in their order, four at a time. Such
// rows, and rows of 256 bytes or more, go only to the second level, which frees the places of the first one earlier. On 16
// cores reads of single keys gain an eighth, reads of all keys 2 %. K that the vector units multiply goes to the first
// level.
#pragma once

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/simd_math_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

using Row = const uint8_t*;

inline constexpr size_t kLine = 64;
inline constexpr int64_t kStreams = 4, kPageBytes = 4096;

HWY_INLINE void prefetch_line(Row line) { __builtin_prefetch(line, 0, 3); }
HWY_INLINE void prefetch_line(Row line, bool to_l2) { to_l2 ? __builtin_prefetch(line, 0, 2) : prefetch_line(line); }

// Returns the rows between two streams: a page, as a power of two. Four times as many fit into the list of pointers.
HWY_INLINE int64_t rows_apart(int64_t stride) {
  int64_t n = 1;
  while (2 * n <= kMaxAhead / kStreams && 2 * n * stride <= kPageBytes) n *= 2;
  return n;
}

// Rows between two streams, and between the computed and the prefetched rows. to_l2: only the second level gets the lines.
struct Lead {
  int64_t apart;
  int64_t ahead;
  bool to_l2;
};

inline constexpr int64_t kScatteredAhead = 64, kLargeRow = 256;
static_assert(kScatteredAhead <= kMaxAhead);

HWY_INLINE Lead lead_of(int64_t row_bytes, int64_t stride, bool is_scattered) {
  const int64_t apart = rows_apart(stride);
  return is_scattered || stride > row_bytes ? Lead{1, kScatteredAhead, true}
                                            : Lead{apart, kStreams * apart, row_bytes >= kLargeRow};
}

// Walks through the lines of the rows in front of a block, in the order of the sketch.
struct Prefetcher {
  const Row* group = nullptr;  // row pointers of the group being fetched; null: nothing to fetch
  int64_t apart = 0;
  int64_t row = 0;    // of each stream
  size_t offset = 0;  // of the line in the row
  int64_t stream = 0;
  size_t row_bytes = 0;
  bool to_l2 = false;
};

// pointers: the block's rows, followed by those ahead.
HWY_INLINE Prefetcher start_prefetch(const Row* pointers, const Lead& lead, int64_t row_bytes) {
  return {pointers + lead.ahead, lead.apart, 0, 0, 0, static_cast<size_t>(row_bytes), lead.to_l2};
}

// Prefetches kBlockKeys consecutive rows from the at-th on, and as many more as the last group of rows may ask for.
HWY_INLINE Prefetcher prefetch_consecutive(const void** pointers, const void* base, int64_t at, int64_t row_bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(at * row_bytes);
  for (int64_t i = 0; i < kBlockKeys + kMaxAhead; ++i)
    pointers[i] = reinterpret_cast<const void*>(first + static_cast<uintptr_t>(i * row_bytes));
  return {reinterpret_cast<const Row*>(pointers), rows_apart(row_bytes), 0, 0, 0, static_cast<size_t>(row_bytes), true};
}

HWY_INLINE void next_row(Prefetcher& p) {
  if (++p.row < p.apart) return;
  p.row = 0;
  p.group += kStreams * p.apart;
}

// Prefetches the line of one stream. The streams take turns.
HWY_INLINE void prefetch_next(Prefetcher& p, int64_t stream) {
  prefetch_line(p.group[p.row + stream * p.apart] + p.offset, p.to_l2);
  if (stream != kStreams - 1) return;
  p.offset += kLine;
  if (p.offset < p.row_bytes) return;
  p.offset = 0;
  next_row(p);
}

// Computing the weights of V takes a share of the time in which V is read, and prefetches the same share of the lines.
// Otherwise memory would idle (2.5 % of the whole).
inline constexpr int64_t kExpShare = 8;

// Prefetches the lines that become due when `bytes` more have been computed.
HWY_INLINE void prefetch_due(Prefetcher& p, int64_t& due, int64_t bytes) {
  for (due += bytes; due >= int64_t{kLine}; due -= int64_t{kLine}) prefetch_next(p, p.stream++ % kStreams);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
