// SPDX-License-Identifier: MIT
// Kernels of a layer beside its products and attention. Rows are tokens; T is float or __nv_bfloat16; sums are f32.
#ifndef EXAMPLES_GENERATE_CUDA_LAYER_KERNELS_H_
#define EXAMPLES_GENERATE_CUDA_LAYER_KERNELS_H_

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace generate {

// A chunk in device memory: its position and its tokens. Graphs read it, so that they work for any token.
struct ChunkInput {
  int64_t position;
  int32_t tokens[1];  // room for the longest chunk
};

// x[row] = table[token of row]. x: [n_rows, n_columns], table: [vocab_size, n_columns]
template <class T>
void embed(float* x, const T* table, const ChunkInput* input, int64_t n_rows, int64_t n_columns, cudaStream_t stream);

// out = weight * x / sqrt(mean(x^2) + eps), row by row. [n_rows, n_columns]
template <class T>
void normalize(T* out, const float* x, const float* weight, float eps, int64_t n_rows, int64_t n_columns,
               cudaStream_t stream);

// Rotates the leading heads of each row: dims i and i + head_dim / 2 turn by position * inv_freq[i].
struct Rotation {
  const ChunkInput* input;
  const float* inv_freq;  // [head_dim / 2]
  int64_t n_heads, head_dim;
  int64_t row_stride;  // elements
};
template <class T>
void rotate(T* rows, const Rotation& rotation, int64_t n_rows, cudaStream_t stream);

// y += bias, row by row. [n_rows, n_columns]
template <class T>
void add_bias(T* y, const float* bias, int64_t n_rows, int64_t n_columns, cudaStream_t stream);

// out = silu(gate) * up. gate_up: [n_rows, 2 * n_columns], gate before up
template <class T>
void gate(T* out, const T* gate_up, int64_t n_rows, int64_t n_columns, cudaStream_t stream);

// *token = the first of the largest logits; -1 if one is not finite. n: below 2^31
void find_most_likely(int32_t* token, const float* logits, int64_t n, cudaStream_t stream);

template <class T>
void store(T* out, const float* in, int64_t n, cudaStream_t stream);

// Fills with uniform random numbers of this standard deviation. The same seed gives the same numbers.
template <class T>
void fill_random(T* out, int64_t n, uint64_t seed, float deviation, cudaStream_t stream);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_CUDA_LAYER_KERNELS_H_
