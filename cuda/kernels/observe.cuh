// SPDX-License-Identifier: MIT
// Moving averages of attention weights: of each query head and resident key, the weights of the call's last queries.
//
//   w_i = exp(logit_i - lse_i);  maw = (1 - alpha) maw + alpha w_i    query after query, the older ones' decay at once
//
// A warp has a tile of keys of one KV head, which lies in one page, in registers, and multiplies it with eight query heads
// at a time on the matrix unit: keys are its 16 rows, query heads its 8 columns. What both sides call dims 0, 1, ... of a
// step of 16 is ours to say, if it is the same. So four lanes have a key's row between them, each eight numbers of every 32,
// as they come from memory, and likewise a query's:
//
//   lane 4 r + j    numbers 32 c + 8 j .. + 7 of keys r and r + 8 and of query head r
//                   gets the logits of these keys and query heads 2 j, 2 j + 1
//
// from where a weight, the old average and the new one are this lane's alone. K is read once, whatever the queries.
//
// Numbers are bf16 there. What is more is the sum of several, and q8_0 and q4_0 are codes, which are bf16 numbers, and a
// factor for 32 of them. So products are exact, but for what is below an f32's last bit; they are summed 32 at a time there,
// and these sums in f32 here, so that roundings are as few as in a chain of an eighth of the dims.
//
// A block has every n_runs-th run of tiles of one sequence and KV head: how many there are is read where they are.
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/kernels/round.cuh"
#include "cuda/kernels/stored.cuh"
#include "cuda/kernels/warp_ops.cuh"

namespace tandem::cuda {

inline constexpr int kEight = 2 * kLaneNumbers;
inline constexpr int kChunk = 32;   // dims: four lanes' eight
inline constexpr int kKeys = 2;     // of a lane, eight apart; a tile has eight times as many
inline constexpr int kColumns = 8;  // query heads at a time

template <int kParts>
__device__ inline void split_eight(const float (&x)[kEight], uint32_t (&parts)[kParts][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t of_pair[kParts];
    split<Bfloat>(x[2 * i], x[2 * i + 1], of_pair);
#pragma unroll
    for (int p = 0; p < kParts; ++p) parts[p][i] = of_pair[p];
  }
}

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
    if (kHasScale) scale = at / kGroup * kGroup < n ? __ldg(reinterpret_cast<const uint16_t*>(scales) + at / kGroup) : 0;
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

  __device__ float factor() const { return kHasScale ? __half2float(__ushort_as_half(static_cast<uint16_t>(scale))) : 1.0f; }
  // Without the factor.
  __device__ void widen(float (&x)[kEight]) const {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const uint32_t word = words[i * kBits / 32];
      if constexpr (kType == TANDEM_F32) x[i] = __uint_as_float(word);
      if constexpr (kType == TANDEM_F16) x[i] = half_of(word, i % 2);
      if constexpr (kType == TANDEM_E4M3) x[i] = half_of(ConvertE4m3::halves(word >> i % 4 / 2 * 16), i % 2);
      // 2^23 + x has x in the last bits of an f32.
      if constexpr (kType == TANDEM_Q8_0)
        x[i] = __uint_as_float(__byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7440u + i % 4)) - 8388736.0f;
      if constexpr (kType == TANDEM_Q4_0) x[i] = __uint_as_float((word >> 4 * i & 0xfu) | 0x4b000000u) - 8388616.0f;
    }
  }
  // As sums of pairs.
  static constexpr int kParts = kType == TANDEM_F32 ? 3 : kType == TANDEM_F16 ? 2 : 1;
  __device__ void split_up(uint32_t (&parts)[kParts][4]) const {
    if constexpr (kType == TANDEM_BF16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) parts[0][i] = words[i];
    } else {
      float x[kEight];
      widen(x);
      split_eight(x, parts);
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

// Of a query's row, where its heads are: kPlain, bf16 in sixteens of bytes; else of any type, anywhere.
template <bool kPlain>
struct QueryEight {
  static constexpr int kParts = kPlain ? 1 : 3;
  uint32_t parts[kParts][4];

  __device__ void load(const DeviceRows& q, int64_t first, int at, int dim, bool is_there) {
    uint4 fours[2] = {};
    if constexpr (kPlain) {
      if (is_there && at < dim)
        fours[0] = __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(q.data) + first + at));
      parts[0][0] = fours[0].x, parts[0][1] = fours[0].y, parts[0][2] = fours[0].z, parts[0][3] = fours[0].w;
    } else {
      float x[2][kLaneNumbers];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (is_there && at + i * kLaneNumbers < dim) fours[i] = load_four(q.data, q.dtype, first + at + i * kLaneNumbers);
        widen_four(q.dtype, fours[i], x[i]);
      }
      split_eight({x[0][0], x[0][1], x[0][2], x[0][3], x[1][0], x[1][1], x[1][2], x[1][3]}, parts);
    }
  }
};

// Adds the products of 16 keys, two of each lane, and eight query heads over 32 dims, those of small parts first; products
// of parts that are together below the last bit of an f32 are left out.
template <class Keys, class Query>
__device__ inline void multiply_chunk(const Keys (&keys)[kKeys], const Query& q, float (&sums)[2 * kKeys]) {
  uint32_t parts[2][Keys::kParts][4];
  keys[0].split_up(parts[0]);
  keys[1].split_up(parts[1]);
  constexpr int kLeast = Keys::kParts > Query::kParts ? Keys::kParts : Query::kParts;  // of what it takes to be exact in f32
  float products[4] = {};
#pragma unroll
  for (int both = kLeast - 1; both >= 0; --both)
#pragma unroll
    for (int p = 0; p <= both; ++p) {
      const int r = both - p;
      if (p >= Keys::kParts || r >= Query::kParts) continue;
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t a[4] = {parts[0][p][i], parts[1][p][i], parts[0][p][i + 1], parts[1][p][i + 1]};
        Bfloat::multiply(products, a, {q.parts[r][i], q.parts[r][i + 1]});
      }
    }
  const float factors[2] = {keys[0].factor(), keys[1].factor()};
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = Keys::kHasScale ? fmaf(factors[i / 2], products[i], sums[i]) : sums[i] + products[i];
}

// Of a warp. Written to only where all is well.
struct Tile {
  float* evicted;  // [n_q_heads][n_evicted]
  bool counts;
};

// token / page_len, of which most fit into 32 bits: that takes a third of the time.
__device__ inline int64_t divide(int64_t n, int32_t by) {
  return n >> 31 == 0 ? static_cast<int64_t>(static_cast<uint32_t>(n) / static_cast<uint32_t>(by)) : n / by;
}

// The keys of a tile, a lane's part of them.
template <int32_t kType, int kChunks>
struct TileKeys {
  StoredEight<kType> stored[kChunks][kKeys];
  int64_t token;  // of the lane's first key
  float* maw;     // of that, and of the KV head's first query head

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

  // Of one query token, eight of its heads; of these are there n_heads. logits: [kKeys][2].
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
  const int64_t seen_by_first = sequence.end - n_queries;  // the last token that it sees
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

// Of the whole block: whether what it has to do goes to the slot as well. first: token of its first run.
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
  const Standing standing = load_standing(exchange);  // looked at when something is written: reading does no harm
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
  const Tile tile = {evicted,
                     is_sound && !is_lost(standing.answered, n_tickets - 1)};  // merge() has seen it, where it waited
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
