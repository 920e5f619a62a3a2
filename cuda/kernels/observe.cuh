// SPDX-License-Identifier: MIT
// Moving averages of attention weights: for each query head and resident key, from the weights of the call's last queries.
//
//   w_i = exp(logit_i - lse_i);  maw = (1 - alpha) maw + alpha w_i    query by query; older queries' decay in one factor
//
// A warp has a tile of keys of one KV head, which lies in one page, in registers. It multiplies the tile with eight query
// heads at a time on the matrix unit: keys are the 16 rows, query heads the 8 columns. The order of dims within a step of
// 16 is free, as long as keys and queries have the same. So four lanes share a key's row. Each has eight numbers of every
// 32, in memory order, and the same of a query:
//
//   lane 4 r + j    numbers 32 c + 8 j .. + 7 of keys r and r + 8 and of query head r
//                   gets the logits of these keys and query heads 2 j, 2 j + 1
//
// So a single lane computes a weight and updates its average. K is read once, for any number of queries.
//
// Factors of these products are bf16. Numbers with more bits are sums of several bf16. q8_0 and q4_0 are codes, which are
// bf16 numbers, and a factor for each 32 of them. So products are exact but for bits below an f32's last. The unit sums 32
// of them at a time, and the kernel adds these sums in f32. So there are as few roundings as in a chain of an eighth of the
// dims.
//
// A block has every n_runs-th run of tiles of one sequence and KV head. It reads the number of tiles from device memory.
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/kernels/stored_eight.cuh"

namespace tandem::cuda {

// The sequence and KV head of a block, as device memory has them.
struct Observed {
  DeviceSequence sequence;
  int64_t end;  // of the tokens that are counted or handed over
  int32_t kv_head;
  int32_t n_counted;  // queries that are counted, the last of the sequence
  float kept;         // factor of an old average before those are counted
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

// The outputs of a warp's tile. Nothing is written unless `counts`.
struct Tile {
  float* evicted;  // [n_q_heads][n_evicted]
  bool counts;
};

// The keys of a tile, and a lane's part of them.
template <int32_t kType, int kChunks>
struct TileKeys {
  StoredEight<kType> stored[kChunks][kKeys];
  int64_t token;  // of the lane's first key
  float* maw;     // of that key and of the KV head's first query head

  __device__ void load(const ObserveCall& call, const Observed& of, int64_t first) {
    const DevicePages& pages = call.observe.pages;
    const DeviceSequence& sequence = of.sequence;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int64_t page_idx = divide(first, pages.page_len);
    const int slot = static_cast<int>(first - page_idx * pages.page_len) + lane / 4;
    const int64_t entry = page_idx - divide(page_idx, sequence.table_len) * sequence.table_len;
    const int64_t page = call.observe.sequences.page_tables[sequence.table_begin + entry];
    const auto plane = [&](Plane p, int64_t bytes) {
      return pages.planes[p] + page + of.kv_head * pages.head_stride[p] + slot * bytes;
    };
    const std::byte* const codes = plane(kPlaneK, call.row_bytes);
    const std::byte* const scales = StoredEight<kType>::kHasScale ? plane(kPlaneKScales, call.scale_bytes) : nullptr;
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        stored[c][i].load(codes + 8 * i * call.row_bytes, scales + 8 * i * call.scale_bytes, c * kChunk + lane % 4 * kEight,
                          call.dim);
    token = first + lane / 4;
    maw = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(pages.maw) + page) +
          int64_t{of.kv_head} * call.group_size * pages.page_len + slot;
  }

  // Multiplies the keys by eight heads of one query token, of which n_heads exist. logits: [kKeys][2].
  template <bool kPlain>
  __device__ void multiply(const ObserveCall& call, int64_t first, int n_heads, float (&logits)[kKeys][2]) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float sums[2 * kKeys] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      QueryEight<kPlain> q;
      q.load(call.observe.q, first + lane / 4 * call.observe.q.head_stride, c * kChunk + lane % 4 * kEight, call.dim,
             lane / 4 < n_heads);
      multiply_chunk(stored[c], q, sums);
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float logit = sums[2 * i + h] * call.sm_scale;
        logits[i][h] = call.soft_cap > 0.0f ? call.soft_cap * tanhf(logit / call.soft_cap) : logit;
      }
  }
};

template <int32_t kType, int kChunks, bool kPlain>
__device__ inline void observe_tile(const ObserveCall& call, const Observed& of, const TileKeys<kType, kChunks>& keys,
                                    const Tile& tile) {
  const DeviceObserve& observe = call.observe;
  const DeviceSequence& sequence = of.sequence;
  const int n_queries = of.n_counted, own = static_cast<int>(threadIdx.x % 4) * 2;
  const int64_t first_query = sequence.first_row + sequence.q_len - n_queries;
  const int64_t seen_by_first = sequence.end - n_queries;  // the last token that the first query sees
  const int64_t end_of_old = observe.has_appended != 0 ? min(of.end, sequence.end - sequence.q_len) : of.end;
  const float decay = n_queries > 0 ? 1.0f - observe.alpha : 1.0f;
  for (int head = 0; head < call.group_size; head += kColumns) {
    const int q_head = of.kv_head * call.group_size + head, n_heads = min(kColumns, call.group_size - head);
    float maw[kKeys][2] = {};
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (own + h < n_heads && keys.token + 8 * i >= sequence.begin && keys.token + 8 * i < end_of_old)
          maw[i][h] = of.kept * keys.maw[(head + own + h) * observe.pages.page_len + 8 * i];
    for (int query = 0; query < n_queries; ++query) {
      const int64_t row = first_query + query;
      float lse[2], logits[kKeys][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) lse[h] = own + h < n_heads ? observe.lse[row * call.n_q_heads + q_head + own + h] : NAN;
      keys.template multiply<kPlain>(call, row * observe.q.token_stride + q_head * observe.q.head_stride, n_heads, logits);
#pragma unroll
      for (int i = 0; i < kKeys; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const bool counts = isfinite(lse[h]) && keys.token + 8 * i <= seen_by_first + query;
          maw[i][h] = fmaf(decay, maw[i][h], counts ? observe.alpha * expf(logits[i][h] - lse[h]) : 0.0f);
        }
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t token = keys.token + 8 * i;
        if (own + h >= n_heads || !tile.counts || token < sequence.begin || token >= of.end) continue;
        keys.maw[(head + own + h) * observe.pages.page_len + 8 * i] = maw[i][h];
        if (token < sequence.evict_end)
          tile.evicted[int64_t{q_head + own + h} * observe.exchange.n_evicted + sequence.first_evicted +
                       (token - sequence.begin)] = maw[i][h];
      }
  }
}

// True if the block writes to the slot as well. The same in the whole block. first: token of its first run.
__device__ inline bool reaches_slot(const DeviceSequence& sequence, int64_t first) {
  return sequence.evict_end > max(sequence.begin, first);
}

template <int32_t kType, int kChunks, bool kPlain>
__global__ void __launch_bounds__(32 * kObserveWarps, kChunks* StoredEight<kType>::kWords <= 16 ? kObserveBlocks : 2)
    observe_kernel(const __grid_constant__ ObserveCall call) {
  constexpr int kTile = 8 * kKeys, kRun = kObserveWarps * kTile;
  begin_behind();
  const DeviceExchange& exchange = call.observe.exchange;
  const int pair = static_cast<int>(blockIdx.x) / call.n_runs, run = static_cast<int>(blockIdx.x) % call.n_runs;
  const Standing standing = load_standing(exchange);  // the fault is checked before writes only, as reads do no harm
  const bool is_sound = standing.fault == 0;
  const Word n_tickets = standing.next_ticket;
  if (pair >= call.observe.sequences.n_sequences * call.n_kv_heads) {  // a single block, without any sequence
    if (is_sound) hand_over_observed(exchange, n_tickets);
    return;
  }
  const Observed of = find_observed(call, pair);
  const int64_t first_run = of.sequence.begin / kRun * kRun + int64_t{run} * kRun;
  const bool has_slot = reaches_slot(of.sequence, first_run);
  float* const evicted = reinterpret_cast<float*>(slot_of(exchange, n_tickets - 1) + exchange.maw_at);
  const Tile tile = {
      evicted, is_sound && !is_lost(standing.answered, n_tickets - 1)};  // merge() has read the answer, where it waited
  const int64_t step = int64_t{call.n_runs} * kRun;
  int64_t first = first_run + static_cast<int>(threadIdx.x / 32) * kTile;
  if (first + kTile <= of.sequence.begin) first += step;
  for (; first < of.end; first += step) {
    TileKeys<kType, kChunks> keys;
    keys.load(call, of, first);
    observe_tile<kType, kChunks, kPlain>(call, of, keys, tile);
  }
  if (!is_sound) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    if (has_slot)
      fence_system();
    else
      __threadfence();
  }
  hand_over_observed(exchange, n_tickets);
}

}  // namespace tandem::cuda
