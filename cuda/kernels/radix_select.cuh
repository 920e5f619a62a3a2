// SPDX-License-Identifier: MIT
// A block finds the largest of many scores.
//
// Scores become unsigned numbers in the same order. Counts of their digits, from the highest on, give the last number that
// is kept, and how many of those that equal it are kept. Candidates are then taken in their order. So of equal candidates
// the lower ones are kept, and the kept ones ascend.
//
// A struct provides the numbers: first(i) makes the i-th number, and again(i) returns it once more to the same block.
#pragma once

#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/kernels/round.cuh"

namespace tandem::cuda {

inline constexpr int kDigitBits = 11, kBins = 1 << kDigitBits;

template <int kWarps>
struct SelectRoom {
  int bins[kBins];
  int of_warps[2][kWarps];
  int digit, n_wanted;
};

// Orders as the float does, with NaN above all others. -0 equals +0.
__device__ inline uint32_t ordered(float score) {
  if (is_nan(score)) return UINT32_MAX;
  const uint32_t bits = bits_of(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Returns the sum of x over the threads before this one, and the sum over all in *total.
template <int kWarps>
__device__ inline int sum_before(int x, int (&of_warps)[kWarps], int* total) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  int before = sum - x;
  *total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += of_warps[w];
    *total += of_warps[w];
  }
  return before;
}

// ---- the last that is kept -----------------------------------------------------------------------------------------------

// Counts a digit for each thread whose `counts` is set. Whole warps call this.
template <int kWarps>
__device__ inline void count_digit(bool counts, int digit, SelectRoom<kWarps>& room) {
  const unsigned active = __ballot_sync(~0u, counts);
  if (!counts) return;
  const unsigned peers = __match_any_sync(active, digit);
  if (static_cast<int>(threadIdx.x % 32) == __ffs(static_cast<int>(peers)) - 1) atomicAdd(&room.bins[digit], __popc(peers));
}

// Finds the digit of the n_wanted-th largest number, and how many of the numbers with that digit are wanted.
template <int kWarps>
__device__ inline void find_digit(SelectRoom<kWarps>& room, int n_wanted) {
  constexpr int kBinsOfThread = kBins / (32 * kWarps);
  const int highest = kBins - 1 - static_cast<int>(threadIdx.x) * kBinsOfThread;
  int own = 0, total = 0;
#pragma unroll
  for (int b = 0; b < kBinsOfThread; ++b) own += room.bins[highest - b];
  int before = sum_before(own, room.of_warps[0], &total);
  if (before < n_wanted && n_wanted <= before + own) {
    int digit = highest;
    for (; before + room.bins[digit] < n_wanted; --digit) before += room.bins[digit];
    room.digit = digit;
    room.n_wanted = n_wanted - before;
  }
  __syncthreads();
}

struct LastKept {
  uint32_t ordered = 0;
  int n_equal = 0;  // how many of the numbers equal to it are kept
};

// A number has three digits. The last one has fewer bits.
inline constexpr int kDigits = 3;
struct Digit {
  int shift;
  uint32_t mask;  // of the digit, shifted to bit 0

  __device__ explicit Digit(int pass)
      : shift(max(32 - kDigitBits * (pass + 1), 0)),
        mask(pass + 1 < kDigits ? kBins - 1 : (1u << (32 - (kDigits - 1) * kDigitBits)) - 1) {}
};

// The bits of the last kept number that are known after some digits.
struct Known {
  LastKept last;
  uint32_t mask = 0;  // of these digits

  // Counts a digit of those of n numbers that begin as the last one does. All threads of the block take part. kAtOnce:
  // numbers that a thread loads before it counts any.
  template <int kAtOnce = 1, class Numbers, int kWarps>
  __device__ void count(const Numbers& numbers, int n, int pass, SelectRoom<kWarps>& room) const {
    constexpr int kThreads = 32 * kWarps;
    const int thread = static_cast<int>(threadIdx.x);
    const Digit digit(pass);
    for (int b = thread; b < kBins; b += kThreads) room.bins[b] = 0;
    __syncthreads();
#pragma unroll(kAtOnce > 1 ? 1 : 4)
    for (int first = 0; first < n; first += kAtOnce * kThreads) {
      uint32_t some[kAtOnce] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = first + k * kThreads + thread;
        if (i < n) some[k] = pass == 0 ? numbers.first(i) : numbers.again(i);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        count_digit(first + k * kThreads + thread < n && (some[k] & mask) == last.ordered,
                    static_cast<int>(some[k] >> digit.shift & digit.mask), room);
    }
    __syncthreads();
  }
  // Takes the next digit from the counts in room.bins.
  template <int kWarps>
  __device__ void take(int pass, SelectRoom<kWarps>& room) {
    const Digit digit(pass);
    find_digit(room, last.n_equal);
    last = {last.ordered | static_cast<uint32_t>(room.digit) << digit.shift, room.n_wanted};
    mask |= digit.mask << digit.shift;
    __syncthreads();
  }
};

// Finds the last of n_kept kept numbers, of n, 1 <= n_kept <= n. The first digits are counted while the numbers are made.
template <class Numbers, int kWarps>
__device__ inline LastKept find_last(const Numbers& numbers, int n, int n_kept, SelectRoom<kWarps>& room) {
  Known known = {{0, n_kept}, 0};
#pragma unroll 1
  for (int pass = 0; pass < kDigits; ++pass) {
    known.count(numbers, n, pass, room);
    known.take(pass, room);
  }
  return known.last;
}

// ---- kept candidates -----------------------------------------------------------------------------------------------------

// Calls take() for all candidates. Each warp has a part of them, which begins at a multiple of 32, and counts its kept
// candidates before it takes any. Whole warps call take(first, kept, at): bit l of `kept` says that candidate first + l is
// kept, and `at` kept candidates come before these.
template <int kAtOnce = 1, class Numbers, int kWarps, class Take>
__device__ inline void take_kept(const Numbers& numbers, int n, LastKept last, SelectRoom<kWarps>& room, Take take) {
  constexpr int kThreads = 32 * kWarps;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int of_warp = (n + kThreads - 1) / kThreads * 32;
  const int begin = min(n, warp * of_warp), end = min(n, begin + of_warp);
  // Calls use(first, number) for all 32 numbers from each `first` on.
  const auto walk = [&](auto use) {
#pragma unroll(kAtOnce > 1 ? 1 : 4)
    for (int first = begin; first < end; first += 32 * kAtOnce) {
      uint32_t some[kAtOnce] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (first + 32 * k + lane < end) some[k] = numbers.again(first + 32 * k + lane);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (kAtOnce == 1 || first + 32 * k < end) use(first + 32 * k, some[k]);
    }
  };
  int n_above = 0, n_equal = 0;
  walk([&](int first, uint32_t number) {
    n_above += __popc(__ballot_sync(~0u, first + lane < end && number > last.ordered));
    n_equal += __popc(__ballot_sync(~0u, first + lane < end && number == last.ordered));
  });
  if (lane == 0) room.of_warps[0][warp] = n_above, room.of_warps[1][warp] = n_equal;
  __syncthreads();
  int at = 0, equal_before = 0;
  for (int w = 0; w < warp; ++w) at += room.of_warps[0][w], equal_before += room.of_warps[1][w];
  at += min(equal_before, last.n_equal);
  const unsigned lanes_before = (1u << lane) - 1;
  walk([&](int first, uint32_t number) {
    const bool is_equal = first + lane < end && number == last.ordered;
    const unsigned equal = __ballot_sync(~0u, is_equal);
    const bool is_above = first + lane < end && number > last.ordered;
    const bool is_kept = is_above || (is_equal && equal_before + __popc(equal & lanes_before) < last.n_equal);
    const unsigned kept = __ballot_sync(~0u, is_kept);
    take(first, kept, at);
    at += __popc(kept);
    equal_before += __popc(equal);
  });
  __syncthreads();
}

}  // namespace tandem::cuda
