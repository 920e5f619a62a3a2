// SPDX-License-Identifier: MIT
// Judges of a search's stages (lib/tables/search.h). A warp has 16 rows at a time, of bounds or of keys, and multiplies
// them with the query rows of the block and KV head (search_keys.cuh). The warps of all pieces take turns.
#pragma once

#include "cuda/kernels/search_job.cuh"
#include "cuda/kernels/search_keys.cuh"

namespace tandem::cuda {

inline constexpr int kTileKeys = 8 * kKeys;

// Items of 16 rows or more. Each warp takes every step-th item.
struct WarpItems {
  int first, step;

  __device__ explicit WarpItems(const SearchCall& call)
      : first(static_cast<int>(blockIdx.x) * kSearchWarps + static_cast<int>(threadIdx.x / 32)),
        step(call.n_pieces * kSearchWarps) {}
};

__device__ inline QueryRows query_rows(const SearchCall& call, const SearchJob& job) {
  const DeviceRows& q = call.search.q;
  const int64_t head = int64_t{blockIdx.y} * call.group_size;
  return {&q, job.sequence.first_row * q.token_stride + head * q.head_stride, call.group_size,
          job.sequence.q_len * call.group_size};
}

__device__ inline int tiles_of(int n_rows) { return (n_rows + kColumns - 1) / kColumns; }

// Raises a score that the same lane has written before, in an earlier pass over the rows.
__device__ inline void raise_score(float* to, float score, bool is_first) { *to = is_first ? score : larger(*to, score); }

// ---- bounds --------------------------------------------------------------------------------------------------------------

// Returns a chunk's row of bounds, of the block's KV head.
__device__ inline const std::byte* bounds_row(const SearchCall& call, const SearchJob& job, const DeviceBounds& bounds,
                                              int chunk) {
  int slot;
  const int64_t page =
      find_page(call.search.sequences, job.sequence, call.keys.page_len, chunk << bounds.chunk_shift, &slot);
  return bounds.data + page + static_cast<int>(blockIdx.y) * bounds.head_stride +
         int64_t{slot >> bounds.chunk_shift} * (4 * call.keys.dim);
}

template <int kParts, bool kIsOneStep>
struct BoundsJudge {
  static constexpr int kBlocks = 2, kChunks = 8;
  using Rows = SixteenRows<TANDEM_BF16, kChunks>;

  // Finds the lane's rows of an item. Behind the last chunk it takes the last one again.
  __device__ static RowPlaces find_rows(const SearchCall& call, const SearchJob& job, const DeviceBounds& bounds, int item) {
    const int own = static_cast<int>(threadIdx.x % 32) / 4;
    RowPlaces to;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int chunk = job.from.chunk(min(item * kTileKeys + own + 8 * i, job.from.n - 1));
      to.codes[i] = to.scales[i] = bounds_row(call, job, bounds, chunk);
    }
    return to;
  }

  // Judges by tiles [first, first + n) of query rows, which are in shared memory.
  __device__ static void judge_tiles(const SearchCall& call, const SearchJob& job, int first, int n, int n_rows) {
    const DeviceBounds& bounds = call.search.bounds[call.search.stages[call.stage].bounds_idx];
    const int lane = static_cast<int>(threadIdx.x % 32), n_items = (job.from.n + kTileKeys - 1) / kTileKeys;
    float* const scores = scores_of(call, static_cast<int>(blockIdx.y));
    Products<TANDEM_BF16, kChunks, kParts, kIsOneStep> products;
    const WarpItems items(call);
    RowPlaces next;
    if (items.first < n_items) next = find_rows(call, job, bounds, items.first);
    for (int item = items.first; item < n_items; item += items.step) {
      products.open(next, 2 * call.keys.dim);
      if (item + items.step < n_items) next = find_rows(call, job, bounds, item + items.step);
      float best[kKeys] = {-INFINITY, -INFINITY};
      for (int tile = 0; tile < n; ++tile) {
        float logits[kKeys][2];
        products.multiply(call, 2 * call.keys.dim, tile, tile > 0, n_rows - (first + tile) * kColumns, logits);
#pragma unroll
        for (int i = 0; i < kKeys; ++i) best[i] = larger(best[i], larger(logits[i][0], logits[i][1]));
      }
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        best[i] = largest_over(best[i], 1, 4);
        const int at = item * kTileKeys + lane / 4 + 8 * i;
        if (lane % 4 == 0 && at < job.from.n) raise_score(scores + at, best[i], first == 0);
      }
    }
  }

  __device__ static void judge(const SearchCall& call, const SearchJob& job) {
    const QueryRows rows = query_rows(call, job);
    const int n_chunks = Rows::n_steps(2 * call.keys.dim) * kChunks;
    for (int first = 0; first < tiles_of(rows.n_rows); first += call.most_tiles) {
      const int n = min(call.most_tiles, tiles_of(rows.n_rows) - first);
      bring_queries<kParts, true>(rows, call.keys.dim, first, n, n_chunks);
      judge_tiles(call, job, first, n, rows.n_rows);
    }
  }
};

// ---- exact ---------------------------------------------------------------------------------------------------------------

// The keys of a stage's candidates in tiles of 16: a chunk is some tiles, or a tile has some chunks. Where sums count,
// tiles of sinks and of the window follow those of the candidates.
struct ExactKeys {
  int shift, n_units, n_tiles;  // n_tiles: of a unit, which is a chunk or a tile
  int n_sinks, n_sink_tiles;
  int window_begin, n_window_tiles;

  __device__ void find(const SearchCall& call, const SearchJob& job) {
    shift = call.search.stages[call.stage].chunk_shift;
    n_tiles = max(1, (1 << shift) / kTileKeys);
    n_units = n_tiles > 1 ? job.from.n : ((job.from.n << shift) + kTileKeys - 1) / kTileKeys;
    n_sinks = n_sink_tiles = n_window_tiles = window_begin = 0;
    if (job.normalises == 0) return;
    n_sinks = static_cast<int>(min(call.search.sink_len, job.p0 + 1));
    n_sink_tiles = (n_sinks + kTileKeys - 1) / kTileKeys;
    window_begin = static_cast<int>(max(call.search.sink_len, job.p0 + 1 - call.search.window_len));
    n_window_tiles = static_cast<int>(max(job.p0 + kTileKeys - window_begin, int64_t{0})) / kTileKeys;
  }
  __device__ int n_items() const { return n_units + n_sink_tiles + n_window_tiles; }
  __device__ int n_tiles_of(int item) const { return item < n_units ? n_tiles : 1; }

  __device__ bool is_of_candidate(const SearchJob& job, int token) const {
    const int chunk = token >> shift;
    const Candidates& from = job.from;
    if (int64_t{chunk} << shift >= job.end) return false;
    if (from.parents == nullptr) return chunk >= from.first && chunk < from.first + from.n;
    int lo = 0, hi = from.n;  // the first candidate that is not before the chunk
    while (lo < hi) {
      const int middle = (lo + hi) / 2;
      if (from.chunk(middle) < chunk)
        lo = middle + 1;
      else
        hi = middle;
    }
    return lo < from.n && from.chunk(lo) == chunk;
  }

  // Returns the token of the key-th row of an item's tile, -1 if it has none.
  __device__ int token(const SearchJob& job, int item, int tile, int key) const {
    if (item < n_units && n_tiles > 1) return (job.from.chunk(item) << shift) + tile * kTileKeys + key;
    if (item < n_units) {
      const int at = item * kTileKeys + key, candidate = at >> shift;
      return candidate < job.from.n ? (job.from.chunk(candidate) << shift) + (at & ((1 << shift) - 1)) : -1;
    }
    const int beside = item - n_units;
    if (beside < n_sink_tiles) return beside * kTileKeys + key < n_sinks ? beside * kTileKeys + key : -1;
    const int token = window_begin + (beside - n_sink_tiles) * kTileKeys + key;
    return token <= job.p0 && !is_of_candidate(job, token) ? token : -1;
  }

  // Finds the lane's rows. A missing row is replaced by an existing one. are_there: whether each row counts.
  __device__ RowPlaces find_rows(const SearchCall& call, const SearchJob& job, int item, int tile,
                                 bool (&are_there)[kKeys]) const {
    const int own = static_cast<int>(threadIdx.x % 32) / 4;
    RowPlaces to;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int at = token(job, item, tile, own + 8 * i);
      are_there[i] = at >= 0;
      int slot;
      const int64_t page = find_page(call.search.sequences, job.sequence, call.keys.page_len, max(at, 0), &slot);
      find_key(call.keys, page, slot, static_cast<int>(blockIdx.y), to, i);
    }
    return to;
  }
};

// Adds a logit of a row to its largest logit and its sum of exponentials relative to that. Leaves out logits that are not
// finite: one such key would make the row's sum NaN, and so the scores of all chunks.
__device__ inline void add_logit(float_pair& to, float logit) {
  if (!(fabsf(logit) < INFINITY)) return;
  if (logit > to.most) {
    to.sum = to.sum * expf(to.most - logit) + 1.0f;
    to.most = logit;
  } else {
    to.sum += expf(logit - to.most);
  }
}
__device__ inline void add_sum(float_pair& to, float_pair other) {
  if (other.most == -INFINITY && other.sum == 0.0f) return;
  const float most = fmaxf(to.most, other.most);
  to.sum = (to.sum == 0.0f ? 0.0f : to.sum * expf(to.most - most)) + other.sum * expf(other.most - most);
  to.most = most;
}

template <int32_t kType, int kParts>
struct ExactJudge {
  static constexpr int kBlocks = kType == TANDEM_F32 ? 1 : 2, kChunks = 4;
  using Rows = SixteenRows<kType, kChunks>;
  using OfType = Products<kType, kChunks, kParts, false>;

  // Calls out(candidate, largest) for each candidate of an item, in the lanes of its first key. n: candidates. numbers: of
  // the lane's keys.
  template <class Out>
  __device__ static void for_each_chunk(const ExactKeys& keys, int n, int item, float (&numbers)[kKeys], Out out) {
    const int own = static_cast<int>(threadIdx.x % 32) / 4;
    if (keys.n_tiles > 1 || keys.shift == 4) {
      const float most = largest_over(larger(numbers[0], numbers[1]), 4, 32);
      if (own == 0) out(item, most);
      return;
    }
    const int len = 1 << keys.shift;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const float most = largest_over(numbers[i], 4, 4 * len);
      const int candidate = (item * kTileKeys + own + 8 * i) >> keys.shift;
      if (own % len == 0 && candidate < n) out(candidate, most);
    }
  }

  // Finds only the largest logits. Keys stay in registers while tiles [first, first + n) of query rows pass.
  __device__ static void judge_tiles(const SearchCall& call, const SearchJob& job, const ExactKeys& keys, int first, int n,
                                     int n_rows) {
    OfType products;
    float* const scores = scores_of(call, static_cast<int>(blockIdx.y));
    const WarpItems items(call);
    for (int item = items.first; item < keys.n_units; item += items.step) {
      float best[kKeys] = {-INFINITY, -INFINITY};
      for (int t = 0; t < keys.n_tiles; ++t) {
        bool are_there[kKeys];
        products.open(keys.find_rows(call, job, item, t, are_there), call.keys.dim);
        for (int tile = 0; tile < n; ++tile) {
          float logits[kKeys][2];
          products.multiply(call, call.keys.dim, tile, tile > 0, n_rows - (first + tile) * kColumns, logits);
#pragma unroll
          for (int i = 0; i < kKeys; ++i) best[i] = larger(best[i], larger(logits[i][0], logits[i][1]));
        }
      }
#pragma unroll
      for (int i = 0; i < kKeys; ++i) best[i] = largest_over(best[i], 1, 4);
      for_each_chunk(keys, job.from.n, item, best, [&](int candidate, float most) {
        if (threadIdx.x % 4 == 0) raise_score(scores + candidate, most, first == 0);
      });
    }
  }

  // Finds each row's largest logit of each chunk, and its sum over all keys. The rows of a tile stay while keys pass. tile:
  // in shared memory, of rows from first_row on.
  __device__ static void judge_rows(const SearchCall& call, const SearchJob& job, const ExactKeys& keys, int tile,
                                    int first_row, int n_rows) {
    OfType products;
    const int column = static_cast<int>(threadIdx.x % 4) * 2;
    float* const scores = scores_of(call, static_cast<int>(blockIdx.y)) + int64_t{first_row + column} * job.from.n;
    float_pair sums[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
    const WarpItems items(call);
    for (int item = items.first; item < keys.n_items(); item += items.step) {
      float best[2][kKeys] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
      for (int t = 0; t < keys.n_tiles_of(item); ++t) {
        bool are_there[kKeys];
        float logits[kKeys][2];
        products.open(keys.find_rows(call, job, item, t, are_there), call.keys.dim);
        products.multiply(call, call.keys.dim, tile, false, n_rows - first_row, logits);
#pragma unroll
        for (int i = 0; i < kKeys; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (!are_there[i]) continue;
            best[h][i] = larger(best[h][i], logits[i][h]);
            add_logit(sums[h], logits[i][h]);
          }
      }
      if (item >= keys.n_units) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        for_each_chunk(keys, job.from.n, item, best[h], [&](int candidate, float most) {
          if (first_row + column + h < n_rows) scores[int64_t{h} * job.from.n + candidate] = most;
        });
    }
    leave_sums(call, sums, first_row, n_rows);
  }

  // Adds up the sums of the block's lanes and warps, and leaves the block's sums in the work space.
  __device__ static void leave_sums(const SearchCall& call, float_pair (&sums)[2], int first_row, int n_rows) {
    __shared__ float_pair of_warps[kSearchWarps][kColumns];
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      for (int mask = 4; mask < 32; mask *= 2)
        add_sum(sums[h], {__shfl_xor_sync(~0u, sums[h].most, mask), __shfl_xor_sync(~0u, sums[h].sum, mask)});
      if (lane < 4) of_warps[threadIdx.x / 32][2 * lane + h] = sums[h];
    }
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x);
    if (row < kColumns && first_row + row < n_rows) {
      float_pair sum = of_warps[0][row];
      for (int w = 1; w < kSearchWarps; ++w) add_sum(sum, of_warps[w][row]);
      sums_of(call, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x))[first_row + row] = sum;
    }
    __syncthreads();
  }

  __device__ static void judge(const SearchCall& call, const SearchJob& job) {
    const QueryRows rows = query_rows(call, job);
    __shared__ ExactKeys keys;
    if (threadIdx.x == 0) keys.find(call, job);  // bring_queries() has barriers
    const int n_chunks = Rows::n_steps(call.keys.dim) * kChunks;
    for (int first = 0; first < tiles_of(rows.n_rows); first += call.most_tiles) {
      const int n = min(call.most_tiles, tiles_of(rows.n_rows) - first);
      bring_queries<kParts, false>(rows, call.keys.dim, first, n, n_chunks);
      if (job.normalises == 0) {
        judge_tiles(call, job, keys, first, n, rows.n_rows);
        continue;
      }
      for (int tile = 0; tile < n; ++tile) judge_rows(call, job, keys, tile, (first + tile) * kColumns, rows.n_rows);
    }
  }
};

// ---- descent -------------------------------------------------------------------------------------------------------------

// The 16 rows are one key of each of 16 chunks: the key that a query head's descent has reached. The head's queries are the
// columns.
template <int32_t kType, bool kPlain>
struct DescentJudge {
  static constexpr int kBlocks = kType == TANDEM_F32 ? 1 : 2, kChunks = 4;
  using Rows = SixteenRows<kType, kChunks>;

  // Finds the largest logits, over the queries of a head of the KV head's group, at the lane's two tokens.
  __device__ static void judge_keys(const SearchCall& call, const SearchJob& job, int head, const int (&tokens)[kKeys],
                                    float (&most)[kKeys]) {
    const DeviceRows& q = call.search.q;
    const int lane = static_cast<int>(threadIdx.x % 32), n_steps = Rows::n_steps(call.keys.dim);
    const int64_t of_head = int64_t{static_cast<int>(blockIdx.y) * call.group_size + head} * q.head_stride;
    RowPlaces places;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      int slot;
      const int64_t page = find_page(call.search.sequences, job.sequence, call.keys.page_len, tokens[i], &slot);
      find_key(call.keys, page, slot, static_cast<int>(blockIdx.y), places, i);
      most[i] = -INFINITY;
    }
    Rows rows;
    rows.load(places, 0, call.keys.dim);
    for (int query = 0; query < job.sequence.q_len; query += kColumns) {
      const int own = query + lane / 4, column = query + lane % 4 * 2;
      float sums[2 * kKeys] = {};
#pragma unroll 1
      for (int step = 0; step < n_steps; ++step) {
        if (n_steps > 1 && (step > 0 || query > 0)) rows.load(places, step, call.keys.dim);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          QueryEight<kPlain> of_query;
          of_query.load(q, (job.sequence.first_row + own) * q.token_stride + of_head,
                        (step * kChunks + c) * kChunk + lane % 4 * kEight, call.keys.dim, own < job.sequence.q_len);
          multiply_chunk(rows.stored[c], of_query, sums);
        }
      }
#pragma unroll
      for (int i = 0; i < kKeys; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (column + h < job.sequence.q_len) most[i] = larger(most[i], sums[2 * i + h] * call.sm_scale);
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) most[i] = largest_over(most[i], 1, 4);
  }

  // Descends for one head. `first` has the first tokens of the lane's chunks. Raises score to the logits of the last keys.
  __device__ static void descend(const SearchCall& call, const SearchJob& job, int head, const int (&first)[kKeys],
                                 float (&score)[kKeys]) {
    int at[kKeys] = {first[0], first[1]};
    float low[kKeys], high[kKeys];
    judge_keys(call, job, head, at, low);
    for (int half = (1 << call.search.stages[call.stage].chunk_shift) / 2; half > 0; half /= 2) {
      const int next[kKeys] = {at[0] + half, at[1] + half};
      judge_keys(call, job, head, next, high);
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        if (!(high[i] > low[i])) continue;
        low[i] = high[i];
        at[i] = next[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) score[i] = larger(score[i], low[i]);
  }

  __device__ static void judge(const SearchCall& call, const SearchJob& job) {
    const int lane = static_cast<int>(threadIdx.x % 32), n_items = (job.from.n + kTileKeys - 1) / kTileKeys;
    const int shift = call.search.stages[call.stage].chunk_shift;
    float* const scores = scores_of(call, static_cast<int>(blockIdx.y));
    const WarpItems items(call);
    for (int item = items.first; item < n_items; item += items.step) {
      int first[kKeys];
      float score[kKeys] = {-INFINITY, -INFINITY};
      const int own = item * kTileKeys + lane / 4;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) first[i] = job.from.chunk(min(own + 8 * i, job.from.n - 1)) << shift;
      for (int head = 0; head < call.group_size; ++head) descend(call, job, head, first, score);
#pragma unroll
      for (int i = 0; i < kKeys; ++i)
        if (lane % 4 == 0 && own + 8 * i < job.from.n) scores[own + 8 * i] = score[i];
    }
  }
};

}  // namespace tandem::cuda
