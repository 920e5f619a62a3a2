// SPDX-License-Identifier: MIT
// Judges of stages for blocks of many queries (wide_queries.cuh). search_judges.cuh serves blocks of few queries.
//
// Where each row's log-sum-exp is subtracted from its scores, an earlier launch makes the rows' sums. So the stage's launch
// finds final scores at once, and writes no score of a single row to memory.
#pragma once

#include <cfloat>

#include "cuda/kernels/query_rows.cuh"
#include "cuda/kernels/search.cuh"
#include "cuda/kernels/wide_queries.cuh"

namespace tandem::cuda {

inline constexpr int kTileShift = 4;
static_assert(1 << kTileShift == kTileKeys);

// A warp's items, of n items of 16 rows. All warps of a warpgroup have n_rounds items. A warp's last item may be behind the
// end of the n.
struct WideItems {
  int first, step, n_rounds;

  __device__ WideItems(const SearchCall& call, int n) {
    const int warp = static_cast<int>(threadIdx.x / 32), begin = static_cast<int>(blockIdx.x) * kSearchWarps;
    first = begin + warp;
    step = call.n_pieces * kSearchWarps;
    const int of_group = begin + __shfl_sync(~0u, warp / kGroupWarps * kGroupWarps, 0);
    n_rounds = of_group < n ? (n - of_group + step - 1) / step : 0;
  }
};

// Finds the largest product of each of the lane's two rows with any query row. The four lanes of a row share the query
// rows. less: the number that is subtracted from the products with each query row, or null.
template <int kWidth, bool kIsLess>
__device__ __forceinline__ void find_largest(const float (&d)[kWidth / 2], float scale, const float* less,
                                             float (&best)[kKeys]) {
  const int own = static_cast<int>(threadIdx.x % 4) * 2;
  float most[kKeys][2];  // chains of half the length
#pragma unroll
  for (int i = 0; i < kKeys; ++i) most[i][0] = most[i][1] = -INFINITY;
#pragma unroll
  for (int n = 0; n < kWidth / 8; ++n) {
    float2 off = {};
    if (kIsLess) off = *reinterpret_cast<const float2*>(less + 8 * n + own);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      most[i][0] = larger(most[i][0], fmaf(d[4 * n + 2 * i], scale, -off.x));
      most[i][1] = larger(most[i][1], fmaf(d[4 * n + 2 * i + 1], scale, -off.y));
    }
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) best[i] = largest_over(larger(most[i][0], most[i][1]), 1, 4);
}

// Returns the address of a token's row of K, of the block's KV head. For token -1, returns the address of an
// existing row, marked as padding.
__device__ inline uintptr_t find_key(const SearchCall& call, const SearchJob& job, int token) {
  int slot;
  const int64_t page = find_page(call.search.sequences, job.sequence, call.keys.page_len, max(token, 0), &slot);
  const std::byte* const row =
      call.keys.codes + page + blockIdx.y * call.keys.codes_head_stride + int64_t{slot} * call.keys.row_bytes;
  return reinterpret_cast<uintptr_t>(row) | (token < 0 ? kIsPadding : 0);
}

// ---- bounds --------------------------------------------------------------------------------------------------------------

template <int kHeads>
struct WideBounds {
  static constexpr int kRows = kHeads * kHeadRows;

  struct Places {
    const SearchCall& call;
    const SearchJob& job;
    const DeviceBounds& bounds;
    FoundRows& found;
    WideItems items;
    bool is_first;  // first pass over query heads

    __device__ int n() const { return items.n_rounds; }
    __device__ int item(int i) const { return items.first + i * items.step; }
    __device__ RowPlaces open(int i) const {
      uint32_t there;
      const auto find = [&](int of, int row) {
        const int chunk = job.from.chunk(min(item(of) * kTileKeys + row, job.from.n - 1));
        return reinterpret_cast<uintptr_t>(bounds_row(call, job, bounds, chunk));
      };
      return find_item(found, i, find, &there);
    }
    __device__ void take(int i, const float (&d)[kRows / 2]) const {
      float best[kKeys];
      find_largest<kRows, false>(d, call.sm_scale, nullptr, best);
      float* const scores = scores_of(call, static_cast<int>(blockIdx.y));
      const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        const int at = item(i) * kTileKeys + lane / 4 + 8 * k;
        if (lane % 4 == 0 && at < job.from.n) raise_score(scores + at, best[k], is_first);
      }
    }
  };

  __device__ static void judge(const SearchCall& call, const SearchJob& job) {
    const DeviceBounds& bounds = call.search.bounds[call.search.stages[call.stage].bounds_idx];
    __shared__ FoundRows found[kSearchWarps];
    const WideItems items(call, (job.from.n + kTileKeys - 1) / kTileKeys);
    for (int head = 0; head < call.group_size; head += kHeads) {
      bring_wide<kHeads, true>(call, job, head);
      Places places = {call, job, bounds, found[threadIdx.x / 32], items, head == 0};
      walk_wide<kRows, kRows>(places, wide_rows(), 2 * call.keys.dim);
    }
  }
};

// ---- exact ---------------------------------------------------------------------------------------------------------------

// Returns the place of a row among the sums: [query heads of the KV head][queries].
__device__ inline int sum_row(const SearchJob& job, int head, int query) { return head * job.sequence.q_len + query; }

template <int kHeads>
struct WideExact {
  static constexpr int kRows = kHeads * kHeadRows;

  struct Places {
    const SearchCall& call;
    const SearchJob& job;
    const ExactKeys& keys;
    const float* less;  // subtracted from the products with each query row
    FoundRows& found;
    WideItems items;
    bool is_first;
    int tile_shift;  // an item has 1 << tile_shift tiles
    float most = 0;  // of the item's tiles so far, where an item is a chunk of one tile or more

    __device__ int n() const { return items.n_rounds << tile_shift; }
    __device__ int item(int i) const { return items.first + (i >> tile_shift) * items.step; }
    __device__ int tile(int i) const { return i & ((1 << tile_shift) - 1); }
    __device__ RowPlaces open(int i) const {
      uint32_t there;
      const auto find = [&](int of, int row) {
        return find_key(call, job, keys.token(job, min(item(of), keys.n_units - 1), tile(of), row));
      };
      return find_item(found, i, find, &there);
    }
    __device__ __forceinline__ void take(int i, const float (&d)[kRows / 2]) {
      float best[kKeys];
      find_largest<kRows, true>(d, call.sm_scale, less, best);
      float* const scores = scores_of(call, static_cast<int>(blockIdx.y));
      const int lane = static_cast<int>(threadIdx.x % 32), of = item(i);
      if (keys.shift >= kTileShift) {
        const float largest = largest_over(larger(best[0], best[1]), 4, 32);
        most = tile(i) == 0 ? largest : larger(most, largest);
        if (tile(i + 1) == 0 && lane == 0 && of < keys.n_units) raise_score(scores + of, most, is_first);
        return;
      }
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        float largest = best[k];
        for (int bit = 0; bit < keys.shift; ++bit) largest = larger(largest, __shfl_xor_sync(~0u, largest, 4 << bit));
        const int row = lane / 4 + 8 * k, chunk = (of * kTileKeys + row) >> keys.shift;
        const bool has_first = (lane & ((4 << keys.shift) - 1)) == 0;
        if (has_first && chunk < job.from.n) raise_score(scores + chunk, largest, is_first);
      }
    }
  };

  // Computes each row's log-sum-exp from the sums of all pieces. 0 where scores are plain logits.
  __device__ static void find_sums(const SearchCall& call, const SearchJob& job, int first_head, float* to) {
    const int row = static_cast<int>(threadIdx.x);
    if (row < kRows && job.normalises == 0) to[row] = 0.0f;
    if (row < kRows && job.normalises != 0) {
      const int head = min(first_head + row / kHeadRows, call.group_size - 1);
      const int at = sum_row(job, head, min(row % kHeadRows, job.sequence.q_len - 1));
      float_pair sum = {-INFINITY, 0.0f};
      for (int p = 0; p < call.n_pieces; ++p) {
        const float_pair* const from = sums_of(call, static_cast<int>(blockIdx.y), p) + at;
        const float2 of = __ldcg(reinterpret_cast<const float2*>(from));
        add_sum(sum, {of.x, of.y});
      }
      to[row] = sum.most + logf(sum.sum);
    }
    __syncthreads();
  }

  __device__ static void judge(const SearchCall& call, const SearchJob& job) {
    __shared__ ExactKeys keys;
    __shared__ __align__(8) float less[kRows];
    __shared__ FoundRows found[kSearchWarps];
    if (threadIdx.x == 0) keys.find(call, job);
    __syncthreads();
    const WideItems items(call, keys.n_units);
    for (int head = 0; head < call.group_size; head += kHeads) {
      bring_wide<kHeads, false>(call, job, head);
      find_sums(call, job, head, less);
      Places places = {call, job, keys, less, found[threadIdx.x / 32], items, head == 0, max(keys.shift - kTileShift, 0)};
      walk_wide<kRows, kRows>(places, wide_rows(), call.keys.dim);
    }
  }
};

// ---- sums ----------------------------------------------------------------------------------------------------------------

// Each row's largest logit and sum of exponentials over the keys that its stage would attend (lib/tables/search.h).
template <int kHeads>
struct WideSums {
  static constexpr int kRows = kHeads * kHeadRows;
  static constexpr int kWidth = kRows < 128 ? kRows : 128;  // query rows at a time, as many as a thread has registers for
  static constexpr float kRoom = 64.0f;                     // doublings that a term may be above the largest one so far

  // A thread has kWidth / 4 query rows, and logits in units of ln 2. A row's sum is relative to 2^most, where `most` is at
  // least its largest logit less kRoom.
  struct Places {
    const SearchCall& call;
    const SearchJob& job;
    const ExactKeys& keys;
    FoundRows& found;
    WideItems items;
    float scale;
    int tile_shift;
    float most[kWidth / 4], sums[kWidth / 4];
    unsigned there = 0;  // of items i to i + 3: a bit for each of the lane's rows that counts

    __device__ int n() const { return items.n_rounds; }
    __device__ int item(int i) const { return items.first + i * items.step; }
    // Returns the token of a row of the i-th item, -1 if it has none. Tiles of candidates come first, then those of sinks
    // and window.
    __device__ int token(int i, int row) const {
      const int tile = item(i), n_unit_tiles = keys.n_units << tile_shift;
      if (tile < n_unit_tiles) return keys.token(job, tile >> tile_shift, tile & (keys.n_tiles - 1), row);
      const int beside = keys.n_units + tile - n_unit_tiles;
      return beside < keys.n_items() ? keys.token(job, beside, 0, row) : -1;
    }
    __device__ RowPlaces open(int i) {
      uint32_t of_item;
      const RowPlaces places = find_item(
          found, i, [&](int of, int row) { return find_key(call, job, token(of, row)); }, &of_item);
      there = (there & ~(3u << i % 4 * 2)) | of_item << i % 4 * 2;
      return places;
    }
    // Makes all terms relative to the largest logits so far, including these.
    __device__ __forceinline__ void raise(const float (&d)[kWidth / 2]) {
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& own = most[2 * n + h];
          const float now = fminf(fmaxf(own, fmaxf(d[4 * n + h] * scale, d[4 * n + 2 + h] * scale)), FLT_MAX);
          sums[2 * n + h] *= exp2_fast(own - now);
          own = now;
        }
    }
    __device__ __forceinline__ void take(int i, float (&d)[kWidth / 2]) {
      const unsigned own = there >> i % 4 * 2 & 3;
      if (!__all_sync(~0u, own == 3)) {
#pragma unroll
        for (int j = 0; j < kWidth / 2; ++j)
          if ((own >> (j / 2 % 2) & 1) == 0) d[j] = -INFINITY;
      }
      float over[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
      for (int j = 0; j < kWidth / 2; ++j) over[j % 4] = fmaxf(over[j % 4], fmaf(d[j], scale, -most[j / 4 * 2 + j % 2]));
      if (__any_sync(~0u, fmaxf(fmaxf(over[0], over[1]), fmaxf(over[2], over[3])) > kRoom)) raise(d);
#pragma unroll
      for (int j = 0; j < kWidth / 2; ++j) {
        const int row = j / 4 * 2 + j % 2;
        sums[row] += exp2_fast(fmaf(d[j], scale, -most[row]));
      }
    }
  };

  // Adds up the sums of all lanes and warps, and writes the block's sums to the work space. first_row: the walk's first
  // query row, counted from the first row of `head`.
  __device__ static void leave(const SearchCall& call, const SearchJob& job, const Places& places, int head, int first_row) {
    __shared__ float_pair of_warps[kSearchWarps][kWidth];
    const int lane = static_cast<int>(threadIdx.x % 32), row = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int j = 0; j < kWidth / 4; ++j) {
      float_pair sum = {places.most[j] * kLn2, places.sums[j]};
      for (int mask = 4; mask < 32; mask *= 2)
        add_sum(sum, {__shfl_xor_sync(~0u, sum.most, mask), __shfl_xor_sync(~0u, sum.sum, mask)});
      if (lane < 4) of_warps[threadIdx.x / 32][j / 2 * 8 + lane * 2 + j % 2] = sum;
    }
    __syncthreads();
    head += (first_row + row) / kHeadRows;
    const int query = (first_row + row) % kHeadRows;
    if (row < kWidth && head < call.group_size && query < job.sequence.q_len) {
      float_pair sum = of_warps[0][row];
      for (int w = 1; w < kSearchWarps; ++w) add_sum(sum, of_warps[w][row]);
      sums_of(call, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x))[sum_row(job, head, query)] = sum;
    }
    __syncthreads();
  }

  __device__ static void leave_sums(const SearchCall& call, const SearchJob& job) {
    __shared__ ExactKeys keys;
    __shared__ FoundRows found[kSearchWarps];
    if (threadIdx.x == 0) keys.find(call, job);
    __syncthreads();
    const WideItems items(call, keys.n_units * keys.n_tiles + keys.n_items() - keys.n_units);
    for (int head = 0; head < call.group_size; head += kHeads) {
      bring_wide<kHeads, false>(call, job, head);
      for (int first_row = 0; first_row < kRows; first_row += kWidth) {
        Places places = {
            call, job, keys, found[threadIdx.x / 32], items, call.sm_scale * kLog2E, max(keys.shift - kTileShift, 0)};
#pragma unroll
        for (int j = 0; j < kWidth / 4; ++j) places.most[j] = -FLT_MAX, places.sums[j] = 0.0f;
        walk_wide<kRows, kWidth>(places, wide_rows() + first_row * kSwizzledRow, call.keys.dim);
        leave(call, job, places, head, first_row);
      }
    }
  }
};

// ---- descent -------------------------------------------------------------------------------------------------------------

template <int kHeads>
struct WideDescent {
  static constexpr int kRows = kHeads * kHeadRows;

  // The key that a query head's descent through a chunk has reached, and the largest logit there. All four lanes of a row
  // read it and write the same values.
  struct Way {
    int at;
    float low;
  };
  using Ways = Way[kHeads][kTileKeys];  // of a warp's 16 chunks

  // The places of a chunk's keys. A chunk lies in up to four pages. The first begins with token `begin`.
  static constexpr int kMostPages = 4;
  struct Chunk {
    int first, begin;  // tokens
    const std::byte* pages[kMostPages];
  };
  using Chunks = Chunk[kTileKeys];  // of a warp

  // Finds the pages of the warp's 16 chunks, candidates [first, first + 16). Each lane finds two pages of a chunk.
  __device__ static void find_chunks(const SearchCall& call, const SearchJob& job, int first, Chunks& chunks) {
    const int lane = static_cast<int>(threadIdx.x % 32), shift = call.search.stages[call.stage].chunk_shift;
    const int page_len = call.keys.page_len, token = job.from.chunk(min(first + lane / 2, job.from.n - 1)) << shift;
    const int begin = token - static_cast<int>(static_cast<unsigned>(token) % static_cast<unsigned>(page_len));
    const auto* const keys = call.keys.codes + blockIdx.y * call.keys.codes_head_stride;
    __syncwarp();
    Chunk& own = chunks[lane / 2];
    own.first = token, own.begin = begin;
#pragma unroll
    for (int p = 0; p < kMostPages / 2; ++p) {
      const int of_page = begin + (lane % 2 * (kMostPages / 2) + p) * page_len;
      int slot;
      if (of_page < token + (1 << shift))
        own.pages[lane % 2 * (kMostPages / 2) + p] =
            keys + find_page(call.search.sequences, job.sequence, page_len, of_page, &slot);
    }
    __syncwarp();
  }

  __device__ static const std::byte* find_row(const SearchCall& call, const Chunk& chunk, int token) {
    int slot = token - chunk.begin, page = 0;
#pragma unroll
    for (int p = 1; p < kMostPages; ++p) page += slot >= p * call.keys.page_len ? 1 : 0;
    slot -= page * call.keys.page_len;
    return chunk.pages[page] + int64_t{slot} * call.keys.row_bytes;
  }

  __device__ static int own_row(int k) { return static_cast<int>(threadIdx.x % 32) / 4 + 8 * k; }

  __device__ __forceinline__ static void follow(const float (&d)[kHeadRows / 2], const SearchCall& call, Way* ways,
                                                const int (&tokens)[kKeys], bool is_first) {
    float logits[kKeys];
    bool goes_on[kKeys];
    find_largest<kHeadRows, false>(d, call.sm_scale, nullptr, logits);
#pragma unroll
    for (int k = 0; k < kKeys; ++k) goes_on[k] = is_first || logits[k] > ways[own_row(k)].low;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kKeys; ++k)
      if (goes_on[k]) ways[own_row(k)] = {tokens[k], logits[k]};
    __syncwarp();
  }

  // The first keys of chunks and of their second halves, which are the same for all heads.
  struct FirstTwo {
    const SearchCall& call;
    const Chunks& chunks;
    Ways& ways;
    int half;

    __device__ int n() const { return half > 0 ? 2 : 1; }
    __device__ RowPlaces open(int i) const {
      RowPlaces places = {};
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        const Chunk& chunk = chunks[own_row(k)];
        places.codes[k] = find_row(call, chunk, chunk.first + i * half);
      }
      return places;
    }
    __device__ __forceinline__ void take(int i, const float (&d)[kRows / 2]) const {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float of_head[kHeadRows / 2];
#pragma unroll
        for (int j = 0; j < kHeadRows / 2; ++j) of_head[j] = d[h * (kHeadRows / 2) + j];
        follow(of_head, call, ways[h], {chunks[own_row(0)].first + i * half, chunks[own_row(1)].first + i * half}, i == 0);
      }
    }
  };

  // One key for each head and level.
  struct OwnKeys {
    const SearchCall& call;
    const Chunks& chunks;
    Ways& ways;
    int half, n_levels;

    __device__ int n() const { return n_levels * kHeads; }
    __device__ void find_tokens(int i, int (&tokens)[kKeys]) const {
#pragma unroll
      for (int k = 0; k < kKeys; ++k) tokens[k] = ways[i % kHeads][own_row(k)].at + (half >> i / kHeads);
    }
    __device__ RowPlaces open(int i) const {
      int tokens[kKeys];
      find_tokens(i, tokens);
      RowPlaces places = {};
#pragma unroll
      for (int k = 0; k < kKeys; ++k) places.codes[k] = find_row(call, chunks[own_row(k)], tokens[k]);
      return places;
    }
    __device__ __forceinline__ void take(int i, const float (&d)[kHeadRows / 2]) const {
      int tokens[kKeys];
      find_tokens(i, tokens);
      follow(d, call, ways[i % kHeads], tokens, false);
    }
    // Returns the place of a head's query rows, from the first head's on.
    __device__ uint32_t rows_at(int i) const { return i % kHeads * (kHeadRows * kSwizzledRow); }
  };

  __device__ static void descend(const SearchCall& call, const Chunks& chunks, Ways& ways) {
    const int half = (1 << call.search.stages[call.stage].chunk_shift) / 2;
    FirstTwo two = {call, chunks, ways, half};
    walk_wide<kRows, kRows>(two, wide_rows(), call.keys.dim);
    // A walk loads an item's keys up to three turns before it judges them. With four heads or more, the head's last key has
    // been judged by then, so one walk takes all levels.
    constexpr bool kIsOneWalk = kHeads > 3;
    const int n_levels = half > 1 ? 31 - __clz(half) : 0;
    for (int level = 0; level < n_levels; level += kIsOneWalk ? n_levels : 1) {
      OwnKeys own = {call, chunks, ways, half >> (level + 1), kIsOneWalk ? n_levels : 1};
      walk_wide<kRows, kHeadRows>(own, wide_rows(), call.keys.dim);
    }
  }

  __device__ static void judge(const SearchCall& call, const SearchJob& job) {
    __shared__ struct {
      Ways ways;
      Chunks chunks;
    } of_warps[kSearchWarps];
    auto& [ways, chunks] = of_warps[threadIdx.x / 32];
    const WideItems items(call, (job.from.n + kTileKeys - 1) / kTileKeys);
    float* const scores = scores_of(call, static_cast<int>(blockIdx.y));
    for (int head = 0; head < call.group_size; head += kHeads) {
      bring_wide<kHeads, false>(call, job, head);
      for (int round = 0; round < items.n_rounds; ++round) {
        const int item = items.first + round * items.step;
        find_chunks(call, job, item * kTileKeys, chunks);
        descend(call, chunks, ways);
#pragma unroll
        for (int k = 0; k < kKeys; ++k) {
          const int at = item * kTileKeys + own_row(k);
          if (threadIdx.x % 4 != 0 || at >= job.from.n) continue;
          float score = ways[0][own_row(k)].low;
          for (int h = 1; h < kHeads; ++h) score = larger(score, ways[h][own_row(k)].low);
          raise_score(scores + at, score, head == 0);
        }
      }
    }
  }
};

// ---- kernels -------------------------------------------------------------------------------------------------------------

template <class Judge>
__global__ void __launch_bounds__(32 * kSearchWarps, 1) wide_search_kernel(const __grid_constant__ SearchCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ SearchJob job;
  if (find_job(call, job)) run_stage<Judge>(call, job);
#endif
}

template <int kHeads>
__global__ void __launch_bounds__(32 * kSearchWarps, 1) wide_sums_kernel(const __grid_constant__ SearchCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ SearchJob job;
  if (find_job(call, job) && job.task == SearchTask::kJudge && job.normalises != 0) WideSums<kHeads>::leave_sums(call, job);
#endif
}

}  // namespace tandem::cuda
