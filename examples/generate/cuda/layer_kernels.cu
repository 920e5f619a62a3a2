// SPDX-License-Identifier: MIT
#include "layer_kernels.h"

namespace generate {
namespace {

constexpr int kThreads = 256;
constexpr int kManyThreads = 1024;  // for kernels with a whole row per block: a decode step waits for its only row

__device__ float wide(float x) { return x; }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void put(float* to, float x) { *to = x; }
__device__ void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16(x); }

unsigned blocks_for(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }
// Blocks are [row, column / kThreads], so any number of rows fits.
__device__ int64_t column_index() { return static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x; }
__device__ int64_t flat_index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
dim3 rows_grid(int64_t n_rows, int64_t n_columns) { return dim3(static_cast<unsigned>(n_rows), blocks_for(n_columns)); }

// Returns the sum over kManyThreads threads, to all of them.
__device__ float sum_of_block(float x) {
  constexpr int kWarps = kManyThreads / 32;
  __shared__ float of_warp[kWarps];
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warp[warp];
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) embed_kernel(float* x, const T* table, const ChunkInput* input, int64_t n) {
  const int64_t row = blockIdx.x, i = column_index();
  if (i < n) x[row * n + i] = wide(table[input->tokens[row] * n + i]);
}

template <class T>
__global__ void __launch_bounds__(kManyThreads)
    normalize_kernel(T* out, const float* x, const float* weight, float eps, int64_t n) {
  const float* row = x + blockIdx.x * n;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += kManyThreads) sum += row[i] * row[i];
  const float factor = 1.0f / sqrtf(sum_of_block(sum) / static_cast<float>(n) + eps);
  for (int64_t i = threadIdx.x; i < n; i += kManyThreads) put(out + blockIdx.x * n + i, weight[i] * (row[i] * factor));
}

template <class T>
__global__ void __launch_bounds__(kThreads) rotate_kernel(T* rows, Rotation rotation) {
  const int64_t half = rotation.head_dim / 2, i = column_index(), head = i / half, pair = i % half;
  if (head >= rotation.n_heads) return;
  const float angle = static_cast<float>(rotation.input->position + blockIdx.x) * rotation.inv_freq[pair];
  float sine, cosine;
  sincosf(angle, &sine, &cosine);
  T* x = rows + blockIdx.x * rotation.row_stride + head * rotation.head_dim + pair;
  const float a = wide(x[0]), b = wide(x[half]);
  put(x, a * cosine - b * sine);
  put(x + half, b * cosine + a * sine);
}

template <class T>
__global__ void __launch_bounds__(kThreads) add_bias_kernel(T* y, const float* bias, int64_t n) {
  const int64_t i = column_index();
  if (i < n) put(y + blockIdx.x * n + i, wide(y[blockIdx.x * n + i]) + bias[i]);
}

template <class T>
__global__ void __launch_bounds__(kThreads) gate_kernel(T* out, const T* gate_up, int64_t n) {
  const int64_t i = column_index();
  if (i >= n) return;
  const T* row = gate_up + blockIdx.x * 2 * n;
  const float x = wide(row[i]);
  put(out + blockIdx.x * n + i, x / (1.0f + expf(-x)) * wide(row[n + i]));
}

// Keeps the larger value, the first of equal ones.
__device__ void take_larger(float* x, int* at, float other, int other_at) {
  if (other > *x || (other == *x && other_at < *at)) *x = other, *at = other_at;
}

__global__ void __launch_bounds__(kManyThreads) most_likely_kernel(int32_t* token, const float* logits, int n) {
  __shared__ float most_of[32];
  __shared__ int at_of[32];
  float most = -INFINITY;
  int at = n, wrong = 0;
  for (int i = threadIdx.x; i < n; i += kManyThreads) {
    wrong |= !isfinite(logits[i]);
    take_larger(&most, &at, logits[i], i);
  }
  for (int offset = 16; offset > 0; offset /= 2)
    take_larger(&most, &at, __shfl_xor_sync(~0u, most, offset), __shfl_xor_sync(~0u, at, offset));
  if (threadIdx.x % 32 == 0) most_of[threadIdx.x / 32] = most, at_of[threadIdx.x / 32] = at;
  wrong = __syncthreads_or(wrong);
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < 32; ++warp) take_larger(&most, &at, most_of[warp], at_of[warp]);
  *token = wrong ? -1 : at;
}

template <class T>
__global__ void __launch_bounds__(kThreads) store_kernel(T* out, const float* in, int64_t n) {
  const int64_t i = flat_index();
  if (i < n) put(out + i, in[i]);
}

// The finaliser of splitmix64, for counters.
__device__ uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <class T>
__global__ void __launch_bounds__(kThreads) random_kernel(T* out, int64_t n, uint64_t seed, float width) {
  const int64_t i = flat_index();
  if (i >= n) return;
  const uint64_t bits = mixed(seed + 0x9e3779b97f4a7c15u * static_cast<uint64_t>(i + 1));
  put(out + i, (static_cast<float>(bits >> 40) * 0x1p-24f - 0.5f) * width);
}

}  // namespace

template <class T>
void embed(float* x, const T* table, const ChunkInput* input, int64_t n_rows, int64_t n_columns, cudaStream_t stream) {
  const dim3 grid = rows_grid(n_rows, n_columns);
  embed_kernel<<<grid, kThreads, 0, stream>>>(x, table, input, n_columns);
}

template <class T>
void normalize(T* out, const float* x, const float* weight, float eps, int64_t n_rows, int64_t n_columns,
               cudaStream_t stream) {
  normalize_kernel<<<static_cast<unsigned>(n_rows), kManyThreads, 0, stream>>>(out, x, weight, eps, n_columns);
}

template <class T>
void rotate(T* rows, const Rotation& rotation, int64_t n_rows, cudaStream_t stream) {
  const dim3 grid = rows_grid(n_rows, rotation.n_heads * rotation.head_dim / 2);
  rotate_kernel<<<grid, kThreads, 0, stream>>>(rows, rotation);
}

template <class T>
void add_bias(T* y, const float* bias, int64_t n_rows, int64_t n_columns, cudaStream_t stream) {
  const dim3 grid = rows_grid(n_rows, n_columns);
  add_bias_kernel<<<grid, kThreads, 0, stream>>>(y, bias, n_columns);
}

template <class T>
void gate(T* out, const T* gate_up, int64_t n_rows, int64_t n_columns, cudaStream_t stream) {
  const dim3 grid = rows_grid(n_rows, n_columns);
  gate_kernel<<<grid, kThreads, 0, stream>>>(out, gate_up, n_columns);
}

void find_most_likely(int32_t* token, const float* logits, int64_t n, cudaStream_t stream) {
  most_likely_kernel<<<1, kManyThreads, 0, stream>>>(token, logits, static_cast<int>(n));
}

template <class T>
void store(T* out, const float* in, int64_t n, cudaStream_t stream) {
  store_kernel<<<blocks_for(n), kThreads, 0, stream>>>(out, in, n);
}

template <class T>
void fill_random(T* out, int64_t n, uint64_t seed, float deviation, cudaStream_t stream) {
  random_kernel<<<blocks_for(n), kThreads, 0, stream>>>(out, n, seed, deviation * sqrtf(12.0f));
}

#define GENERATE_KERNELS_OF(T)                                                                    \
  template void embed(float*, const T*, const ChunkInput*, int64_t, int64_t, cudaStream_t);       \
  template void normalize(T*, const float*, const float*, float, int64_t, int64_t, cudaStream_t); \
  template void rotate(T*, const Rotation&, int64_t, cudaStream_t);                               \
  template void add_bias(T*, const float*, int64_t, int64_t, cudaStream_t);                       \
  template void gate(T*, const T*, int64_t, int64_t, cudaStream_t);                               \
  template void store(T*, const float*, int64_t, cudaStream_t);                                   \
  template void fill_random(T*, int64_t, uint64_t, float, cudaStream_t);
GENERATE_KERNELS_OF(float)
GENERATE_KERNELS_OF(__nv_bfloat16)

}  // namespace generate
