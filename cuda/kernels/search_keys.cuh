// SPDX-License-Identifier: MIT
// The rows that a search reads: rows of the window, 16 at a time, and query rows in shared memory. stored_eight.cuh says
// how a warp multiplies them.
#pragma once

#include "cuda/kernels/stored_eight.cuh"
#include "cuda/search_call.h"

namespace tandem::cuda {

// Returns the place of a token's page: bytes from the page called 0. *slot: the token's place in it.
__device__ inline int64_t find_page(const DeviceSequences& sequences, const DeviceSequence& sequence, int page_len,
                                    int token, int* slot) {
  int page_idx = static_cast<int>(static_cast<unsigned>(token) / static_cast<unsigned>(page_len));
  *slot = token - page_idx * page_len;
  if (page_idx >= sequence.table_len) page_idx %= sequence.table_len;
  return __ldcg(sequences.page_tables + sequence.table_begin + page_idx);
}

// The places of the lane's two rows.
struct RowPlaces {
  const std::byte* codes[kKeys];
  const std::byte* scales[kKeys];
};

__device__ inline void find_key(const WindowKeys& keys, int64_t page, int slot, int kv_head, RowPlaces& to, int i) {
  to.codes[i] = keys.codes + page + kv_head * keys.codes_head_stride + int64_t{slot} * keys.row_bytes;
  to.scales[i] = keys.scales + page + kv_head * keys.scales_head_stride + int64_t{slot} * keys.scale_bytes;
}

// 16 rows of n numbers, kChunks * kChunk of them at a time. n_steps(): the number of such steps. All steps but the last are
// full.
template <int32_t kType, int kChunks>
struct SixteenRows {
  using Stored = StoredEight<kType>;
  Stored stored[kChunks][kKeys];

  static __host__ __device__ constexpr int n_steps(int n) { return (n + kChunks * kChunk - 1) / (kChunks * kChunk); }
  __device__ void load(const RowPlaces& rows, int step, int n) {
    const int own = static_cast<int>(threadIdx.x % 4) * kEight;
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        stored[c][i].load(rows.codes[i], rows.scales[i], (step * kChunks + c) * kChunk + own, n);
  }
};

// Query rows in shared memory: [tiles of eight rows][chunks of all steps][parts][lanes], in the order of the products.
extern __shared__ uint4 query_tiles[];

template <int kQueryParts>
struct SharedQuery {
  static constexpr int kParts = kQueryParts;
  uint32_t parts[kParts][4];

  __device__ void load(int chunk) {
    const uint4* const at = query_tiles + chunk * (kParts * 32) + threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const uint4 four = at[p * 32];
      parts[p][0] = four.x, parts[p][1] = four.y, parts[p][2] = four.z, parts[p][3] = four.w;
    }
  }
};

// Rows of q of one KV head: row r is head r % group_size of query r / group_size.
struct QueryRows {
  const DeviceRows* q;
  int64_t first;  // place of the first row, in elements
  int group_size, n_rows;

  __device__ int64_t at(int row) const {
    return first + row / group_size * q->token_stride + row % group_size * q->head_stride;
  }
};

// Reads four numbers of a row from `at` on. Against bounds the row is [numbers below 0 | numbers above 0].
template <bool kIsOfBounds>
__device__ inline void read_four(const QueryRows& rows, int row, int at, int dim, float* x) {
  const bool is_upper = kIsOfBounds && at >= dim;
  const int from = is_upper ? at - dim : at;
  float four[kLaneNumbers] = {};
  if (row < rows.n_rows && from < dim)
    widen_four(rows.q->dtype, load_four(rows.q->data, rows.q->dtype, rows.at(row) + from), four);
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i) x[i] = !kIsOfBounds || (four[i] < 0.0f) != is_upper ? four[i] : 0.0f;
}

// Brings tiles [first, first + n) to shared memory, n_chunks of each. All threads of the block take part.
template <int kParts, bool kIsOfBounds>
__device__ inline void bring_queries(const QueryRows& rows, int dim, int first, int n, int n_chunks) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x / 32); i < n * n_chunks; i += kSearchWarps) {
    const int row = (first + i / n_chunks) * kColumns + lane / 4, at = i % n_chunks * kChunk + lane % 4 * kEight;
    float x[kEight];
    read_four<kIsOfBounds>(rows, row, at, dim, x);
    read_four<kIsOfBounds>(rows, row, at + kLaneNumbers, dim, x + kLaneNumbers);
    uint32_t parts[kParts][4];
    split_eight(x, parts);
#pragma unroll
    for (int p = 0; p < kParts; ++p)
      query_tiles[(i * kParts + p) * 32 + lane] = make_uint4(parts[p][0], parts[p][1], parts[p][2], parts[p][3]);
  }
  __syncthreads();
}

// Returns the larger number, or NaN if either is NaN.
__device__ inline float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ inline float largest_over(float x, int first_mask, int end_mask) {
  for (int mask = first_mask; mask < end_mask; mask *= 2) x = larger(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}

// Multiplies 16 rows with tiles of query rows in shared memory. kIsOneStep: a row has no more numbers than a step. n, in
// all calls: numbers of a row.
template <int32_t kType, int kChunks, int kParts, bool kIsOneStep>
struct Products {
  SixteenRows<kType, kChunks> rows;
  RowPlaces places;

  __device__ void open(const RowPlaces& at, int n) {
    places = at;
    rows.load(places, 0, n);
  }
  // tile: in shared memory. n_rows: query rows from the tile's first row on; missing rows get -inf. is_again: not the first
  // call since open().
  __device__ void multiply(const SearchCall& call, int n, int tile, bool is_again, int n_rows, float (&logits)[kKeys][2]) {
    float sums[2 * kKeys] = {};
    const int n_steps = kIsOneStep ? 1 : SixteenRows<kType, kChunks>::n_steps(n);
#pragma unroll 1
    for (int step = 0; step < n_steps; ++step) {
      if (!kIsOneStep && n_steps > 1 && (step > 0 || is_again)) rows.load(places, step, n);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        SharedQuery<kParts> q;
        q.load((tile * n_steps + step) * kChunks + c);
        multiply_chunk(rows.stored[c], q, sums);
      }
    }
    const int column = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) logits[i][h] = column + h < n_rows ? sums[2 * i + h] * call.sm_scale : -INFINITY;
  }
};

}  // namespace tandem::cuda
