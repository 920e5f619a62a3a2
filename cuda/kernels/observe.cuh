// SPDX-License-Identifier: MIT
// Moving averages of attention weights: of each query head and resident key, the weights of the call's last queries.
//
//   w_i = exp(logit_i - lse_i);  maw = (1 - alpha) maw + alpha w_i    query after query, the older ones' decay at once
//
// A warp has a tile of 256 / kLanes keys of one KV head, which lies in one page, in registers: eight numbers of eight keys a
// lane, kLanes lanes a key. Row by row of q, sums over eight numbers are folded so that each lane ends up with one key's:
//
//   eight sums a lane  ->  4, 2, 1 by exchanging halves with the lane that has the others  ->  a key's own, in kLanes / 8
//   lanes
//
// from where its weight, its old average and the new one are this lane's alone. K is read once, whatever the queries; rows
// of q, lse and old averages are on their way one step ahead.
//
// A block has every n_runs-th run of tiles of one sequence and KV head: how many there are is read where they are.
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/kernels/round.cuh"
#include "cuda/kernels/stored.cuh"

namespace tandem::cuda {

inline constexpr int kEight = 2 * kLaneNumbers;

// Eight numbers of a stored row, as they are there.
template <int32_t kType>
struct StoredEight {
  static constexpr int kBits = kType == TANDEM_F32                            ? 32
                               : kType == TANDEM_F16 || kType == TANDEM_BF16  ? 16
                               : kType == TANDEM_E4M3 || kType == TANDEM_Q8_0 ? 8
                                                                              : 4;
  static constexpr bool kHasScale = kType == TANDEM_Q8_0 || kType == TANDEM_Q4_0;
  static constexpr int kWords = kBits / 4, kGroup = 32;
  uint32_t words[kWords];
  uint32_t scale;

  // at: in the row; n: of the row, a multiple of four. What is behind its end is a number where the row has numbers.
  __device__ void load(const std::byte* row, const std::byte* scales, int at, int n) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    if (kHasScale) scale = at < n ? __ldg(reinterpret_cast<const uint16_t*>(scales) + at / kGroup) : 0;
    if (at >= n) return;
    const std::byte* const from = row + at * kBits / 8;
    if (n % kEight == 0)
      load_whole(from);
    else
      load_fours(from, at + kLaneNumbers < n);
  }

  __device__ void load_whole(const std::byte* from) {
    if constexpr (kWords >= 4) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
        words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
      }
    } else if constexpr (kWords == 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
      words[0] = two.x, words[1] = two.y;
    } else {
      words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
    }
  }

  // Rows begin where four numbers may begin, and no more than that.
  __device__ void load_fours(const std::byte* from, bool has_second) {
    if constexpr (kWords == 1) {
      const auto* halves = reinterpret_cast<const uint16_t*>(from);
      words[0] = __ldg(halves) | (has_second ? static_cast<uint32_t>(__ldg(halves + 1)) : 0u) << 16;
    } else {
      const auto* at = reinterpret_cast<const uint32_t*>(from);
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        if (i < kWords / 2 || has_second) words[i] = __ldg(at + i);
    }
  }

  __device__ void widen(float (&x)[kEight]) const {
    const float factor = kHasScale ? __half2float(__ushort_as_half(static_cast<uint16_t>(scale))) : 1.0f;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const uint32_t word = words[i * kBits / 32];
      if constexpr (kType == TANDEM_F32) x[i] = __uint_as_float(word);
      if constexpr (kType == TANDEM_BF16) x[i] = __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
      if constexpr (kType == TANDEM_F16) x[i] = half_of(word, i % 2);
      if constexpr (kType == TANDEM_E4M3) x[i] = half_of(ConvertE4m3::halves(word >> i % 4 / 2 * 16), i % 2);
      // 2^23 + x has x in the last bits of an f32.
      if constexpr (kType == TANDEM_Q8_0)
        x[i] = factor * (__uint_as_float(__byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7440u + i % 4)) - 8388736.0f);
      if constexpr (kType == TANDEM_Q4_0)
        x[i] = factor * (__uint_as_float((word >> 4 * i & 0xfu) | 0x4b000000u) - 8388616.0f);
    }
  }

  __device__ static float half_of(uint32_t pair, int i) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(pair >> 16 * i)));
  }
};

// What a block is about, as it is in device memory.
struct Observed {
  DeviceSequence sequence;
  int64_t end;  // of the tokens that anything is done with
  int32_t kv_head;
  int32_t n_counted;  // of its queries, the last
  float kept;         // of an old average, before those are counted
};

__device__ inline Observed find_observed(const ObserveCall& call, int pair) {
  Observed of;
  of.sequence = call.observe.sequences.sequences[pair / call.n_kv_heads];
  of.kv_head = pair % call.n_kv_heads;
  const int q_len = of.sequence.q_len;
  of.end = q_len > 0 ? of.sequence.end : min(of.sequence.end, of.sequence.evict_end);
  of.n_counted = min(q_len, call.observe.n_counted);
  of.kept = q_len == of.n_counted ? 1.0f : powf(1.0f - call.observe.alpha, static_cast<float>(q_len - of.n_counted));
  return of;
}

// Where a lane's key is.
struct KeyPlace {
  int64_t token;
  float* maw;  // of the KV head's first query head
  bool is_resident, is_new;
};

// One query of one head, and with a head's first what its average was.
struct ObserveStep {
  uint4 q[2];
  float lse, old;
};

// query: of those that count; where none does, there is only what the average was.
template <int kLanes>
__device__ inline ObserveStep load_step(const ObserveCall& call, const Observed& of, const KeyPlace& key, int head,
                                        int query) {
  const DeviceObserve& observe = call.observe;
  ObserveStep step = {};
  const int q_head = of.kv_head * call.group_size + head, n = of.n_counted;
  if (query == 0 && key.is_resident && !key.is_new) step.old = key.maw[int64_t{head} * observe.pages.page_len];
  step.lse = NAN;
  if (n == 0) return step;
  const int64_t row = of.sequence.first_row + of.sequence.q_len - n + query;
  const int64_t first = row * observe.q.token_stride + q_head * observe.q.head_stride;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = static_cast<int>(threadIdx.x % kLanes) * kEight + i * kLaneNumbers;
    if (at < call.dim) step.q[i] = load_four(observe.q.data, observe.q.dtype, first + at);
  }
  step.lse = observe.lse[row * call.n_q_heads + q_head];
  return step;
}

// Sums over kLanes lanes of eight numbers each: the lane's own, k = lane % kLanes / (kLanes / 8).
template <int kLanes>
__device__ inline float fold(float (&sums)[8]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int n = 4, mask = kLanes / 2; n > 0; n /= 2, mask /= 2) {
    const bool has_upper = (lane & mask) != 0;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float other = __shfl_xor_sync(~0u, has_upper ? sums[k] : sums[k + n], mask);
      sums[k] = (has_upper ? sums[k + n] : sums[k]) + other;
    }
  }
#pragma unroll
  for (int mask = kLanes / 16; mask > 0; mask /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], mask);
  return sums[0];
}

template <int kLanes>
__device__ inline float logit_of(const ObserveCall& call, const ObserveStep& step, const float (&k)[8][kEight]) {
  float q[2][kLaneNumbers], sums[8];
  widen_four(call.observe.q.dtype, step.q[0], q[0]);
  widen_four(call.observe.q.dtype, step.q[1], q[1]);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    sums[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < kEight; ++i) sums[j] = fmaf(q[i / 4][i % 4], k[j][i], sums[j]);
  }
  const float logit = fold<kLanes>(sums) * call.sm_scale;
  return call.soft_cap > 0.0f ? call.soft_cap * tanhf(logit / call.soft_cap) : logit;
}

// Of a warp. Written to only where all is well.
struct Tile {
  int64_t first;   // token
  float* evicted;  // [n_q_heads][n_evicted]
  bool is_sound;
};

// token / page_len, of which most fit into 32 bits: that takes a third of the time.
__device__ inline int64_t divide(int64_t n, int32_t by) {
  return n >> 31 == 0 ? static_cast<int64_t>(static_cast<uint32_t>(n) / static_cast<uint32_t>(by)) : n / by;
}

template <int32_t kType, int kLanes>
__device__ inline void observe_tile(const ObserveCall& call, const Observed& of, const Tile& tile) {
  constexpr int kKeys = 32 / kLanes;  // at a time
  const DeviceObserve& observe = call.observe;
  const DeviceSequence& sequence = of.sequence;
  const DevicePages& pages = observe.pages;
  const int lane = static_cast<int>(threadIdx.x % 32), member = lane % kLanes;
  const int64_t page_idx = divide(tile.first, pages.page_len);
  const int slot = static_cast<int>(tile.first - page_idx * pages.page_len);
  const int64_t entry = page_idx - divide(page_idx, sequence.table_len) * sequence.table_len;
  const int64_t page = observe.sequences.page_tables[sequence.table_begin + entry];
  const auto plane = [&](Plane p, int64_t bytes) {
    return pages.planes[p] + page + of.kv_head * pages.head_stride[p] + (slot + lane / kLanes) * bytes;
  };

  StoredEight<kType> stored[8];
  const std::byte* const codes = plane(kPlaneK, call.row_bytes);
  const std::byte* const scales = StoredEight<kType>::kHasScale ? plane(kPlaneKScales, call.scale_bytes) : nullptr;
#pragma unroll
  for (int j = 0; j < 8; ++j)
    stored[j].load(codes + j * kKeys * call.row_bytes, scales + j * kKeys * call.scale_bytes, member * kEight, call.dim);

  KeyPlace key;
  const int own = member / (kLanes / 8) * kKeys + lane / kLanes;
  key.token = tile.first + own;
  key.is_resident = key.token >= sequence.begin && key.token < of.end;
  key.is_new = observe.has_appended != 0 && key.token >= sequence.end - sequence.q_len;
  key.maw = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(pages.maw) + page) +
            int64_t{of.kv_head} * call.group_size * pages.page_len + slot + own;
  ObserveStep next = load_step<kLanes>(call, of, key, 0, 0);
  float k[8][kEight];
#pragma unroll
  for (int j = 0; j < 8; ++j) stored[j].widen(k[j]);

  const bool writes = tile.is_sound && key.is_resident && member % (kLanes / 8) == 0;
  const bool leaves = writes && key.token < sequence.evict_end;
  const int64_t place = sequence.first_evicted + (key.token - sequence.begin);
  const int n_queries = max(of.n_counted, 1);
  const float decay = of.n_counted > 0 ? 1.0f - observe.alpha : 1.0f;
  const int64_t seen_by_first = sequence.end - of.n_counted;  // the last token that it sees
  for (int head = 0; head < call.group_size; ++head) {
    float maw = of.kept * next.old;
    for (int query = 0; query < n_queries; ++query) {
      const ObserveStep step = next;
      const bool is_last = query + 1 == n_queries;
      if (!is_last || head + 1 < call.group_size)
        next = load_step<kLanes>(call, of, key, is_last ? head + 1 : head, is_last ? 0 : query + 1);
      const float logit = logit_of<kLanes>(call, step, k);
      const bool counts = isfinite(step.lse) && key.token <= seen_by_first + query;
      maw = fmaf(decay, maw, counts ? observe.alpha * expf(logit - step.lse) : 0.0f);
    }
    if (writes) key.maw[int64_t{head} * pages.page_len] = maw;
    if (leaves) tile.evicted[(int64_t{of.kv_head} * call.group_size + head) * observe.exchange.n_evicted + place] = maw;
  }
}

// Of the whole block: whether what it has to do goes to the slot as well. first: token of its first run.
__device__ inline bool reaches_slot(const DeviceSequence& sequence, int64_t first) {
  return sequence.evict_end > max(sequence.begin, first);
}

template <int32_t kType, int kLanes>
__global__ void __launch_bounds__(32 * kObserveWarps, kObserveBlocks)
    observe_kernel(const __grid_constant__ ObserveCall call) {
  constexpr int kTile = 8 * 32 / kLanes, kRun = kObserveWarps * kTile;
  const DeviceExchange& exchange = call.observe.exchange;
  const int pair = static_cast<int>(blockIdx.x) / call.n_runs, run = static_cast<int>(blockIdx.x) % call.n_runs;
  const bool is_sound = !is_faulty(exchange);  // looked at when something is written: reading does no harm
  const Word n_tickets = load_relaxed(word(exchange, kNextTicket));
  if (pair >= call.observe.sequences.n_sequences * call.n_kv_heads) {  // a single block, without any sequence
    if (is_sound) hand_over_observed(exchange, n_tickets, count_block(exchange));
    return;
  }
  const Observed of = find_observed(call, pair);
  const int64_t first_run = of.sequence.begin / kRun * kRun + int64_t{run} * kRun;
  const bool has_slot = reaches_slot(of.sequence, first_run);
  BlockCount count = {};
  if (!has_slot && is_sound) count = count_block(exchange);  // on its way meanwhile
  float* const evicted = reinterpret_cast<float*>(slot_of(exchange, n_tickets - 1) + exchange.maw_at);
  for (int64_t first = first_run + static_cast<int>(threadIdx.x / 32) * kTile; first < of.end;
       first += int64_t{call.n_runs} * kRun)
    if (first + kTile > of.sequence.begin) observe_tile<kType, kLanes>(call, of, {first, evicted, is_sound});
  if (!is_sound) return;
  if (has_slot) {
    __syncthreads();
    if (threadIdx.x == 0) fence_system();
    count = count_block(exchange);
  }
  hand_over_observed(exchange, n_tickets, count);
}

}  // namespace tandem::cuda
