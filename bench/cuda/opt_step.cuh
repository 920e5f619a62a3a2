// SPDX-License-Identifier: MIT
// The parts of a decoder layer of OPT's shapes around attention, in f16, for batches with one new token per sequence: layer
// norms without weights, the products q, k, v and o, two more with a ReLU between them, residuals. Only K and V have biases.
#pragma once

#include <memory>

#include "cuda/cublas_products.h"
#include "opt_layer.cuh"

namespace tandem::test {

// A block of threads has a row. Sums are in f32.
static __global__ void norm_rows(const __half* x, __half* to, int hidden) {
  __shared__ float shared[2];
  const __half* row = x + int64_t{blockIdx.x} * hidden;
  for (int pass = 0; pass < 2; ++pass) {
    if (threadIdx.x == 0) shared[pass] = 0.0f;
    __syncthreads();
    const float mean = pass == 0 ? 0.0f : shared[0] / static_cast<float>(hidden);
    float sum = 0.0f;
    for (int i = static_cast<int>(threadIdx.x); i < hidden; i += static_cast<int>(blockDim.x)) {
      const float d = __half2float(row[i]) - mean;
      sum += pass == 0 ? d : d * d;
    }
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
    if (threadIdx.x % 32 == 0) atomicAdd(&shared[pass], sum);
    __syncthreads();
  }
  const float mean = shared[0] / static_cast<float>(hidden), scale = rsqrtf(shared[1] / static_cast<float>(hidden) + kEps);
  for (int i = static_cast<int>(threadIdx.x); i < hidden; i += static_cast<int>(blockDim.x))
    to[int64_t{blockIdx.x} * hidden + i] = __float2half((__half2float(row[i]) - mean) * scale);
}

static __global__ void add_bias(__half* y, const float* b, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  __half& one = y[int64_t{blockIdx.y} * n + i];
  one = __float2half(__half2float(one) + b[i]);
}

static __global__ void relu(__half* y, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n && __half2float(y[i]) < 0.0f) y[i] = __float2half(0.0f);
}

// Current addresses of a layer's weights: W_K, W_V, W_Q with W_O, and the two of the MLP. [n_out, n_in] each.
struct WeightsThere {
  const __half *k = nullptr, *v = nullptr, *qo = nullptr, *mlp = nullptr;
};

// Rows of all batches, and work rows of the current batch.
class OptStep {
 public:
  const Geometry& geometry;
  const int64_t batch, n_batches;
  cudaStream_t stream;

  OptStep(const OptLayer& layer, int64_t n_sequences, int64_t batches)
      : geometry(layer.geometry),
        batch(n_sequences),
        n_batches(batches),
        first_(random_halves(batches * n_sequences * geometry.hidden, 2.0f, 11)),
        start_(first_),
        x_(first_),
        normed_(room(1)),
        q_(room(1)),
        k_(room(1)),
        v_(room(1)),
        o_(room(1)),
        mlp_(room(4)),
        b_(layer.b) {
    must(cudaStreamCreate(&stream));
    products_ = std::make_unique<generate::CublasProducts>(stream);
    __half* rows[] = {q_.data, k_.data, v_.data, o_.data};
    for (int i = 0; i < 4; ++i) views[i] = half_tensor(rows[i], {batch, geometry.n_heads, kHeadDim}, true);
  }
  OptStep(const OptStep&) = delete;
  ~OptStep() {
    products_.reset();
    cudaStreamDestroy(stream);
  }

  tandem_tensor views[4];  // q, k, v, o of a batch
  __half* x(int64_t b) const { return x_.data + b * batch * geometry.hidden; }
  const __half* k() const { return k_.data; }
  const __half* v() const { return v_.data; }
  void reset() { must(cudaMemcpyAsync(x_.data, start_.data, first_.size() * 2, cudaMemcpyDeviceToDevice, stream)); }
  std::vector<__half> result() const {
    std::vector<__half> rows(first_.size());
    must(cudaStreamSynchronize(stream));
    must(cudaMemcpy(rows.data(), x_.data, rows.size() * 2, cudaMemcpyDeviceToHost));
    return rows;
  }
  void make_k_v(int64_t b, const WeightsThere& w) {
    const int n = geometry.hidden;
    norm_rows<<<static_cast<unsigned>(batch), 256, 0, stream>>>(x(b), normed_.data, n);
    for (const bool is_k : {true, false}) {
      __half* const y = is_k ? k_.data : v_.data;
      multiply(is_k ? w.k : w.v, normed_.data, y, n, n, false);
      add_bias<<<dim3(static_cast<unsigned>(n / 128), static_cast<unsigned>(batch)), 128, 0, stream>>>(y, b_.data, n);
    }
  }
  void make_q(const WeightsThere& w) { multiply(w.qo, normed_.data, q_.data, geometry.hidden, geometry.hidden, false); }
  void add_attention(int64_t b, const WeightsThere& w) {
    const int64_t n = geometry.hidden;
    multiply(w.qo + n * n, o_.data, x(b), n, n, true);
  }
  void add_mlp(int64_t b, const WeightsThere& w) {
    const int64_t n = geometry.hidden, inner = 4 * n;
    norm_rows<<<static_cast<unsigned>(batch), 256, 0, stream>>>(x(b), normed_.data, geometry.hidden);
    multiply(w.mlp, normed_.data, mlp_.data, n, inner, false);
    relu<<<static_cast<unsigned>(batch * inner / 256), 256, 0, stream>>>(mlp_.data, batch * inner);
    multiply(w.mlp + n * inner, mlp_.data, x(b), inner, n, true);
  }

 private:
  std::vector<__half> room(int64_t times) const {
    return std::vector<__half>(static_cast<size_t>(times * batch * geometry.hidden), __float2half(NAN));
  }
  void multiply(const __half* w, const __half* x, __half* y, int64_t n_in, int64_t n_out, bool adds) {
    products_->apply({w, x, y, batch, n_in, n_out, CUDA_R_16F, CUDA_R_16F, adds});
  }

  std::vector<__half> first_;
  OnDevice<__half> start_, x_, normed_, q_, k_, v_, o_, mlp_;
  OnDevice<float> b_;
  std::unique_ptr<generate::CublasProducts> products_;
};

// The weights of one layer, which all layers share.
struct HostWeights {
  std::vector<__half> qo, mlp;

  explicit HostWeights(const Geometry& g) {
    const int64_t n = g.hidden;
    const float size = 1.0f / std::sqrt(static_cast<float>(n));
    qo = random_halves(2 * n * n, size, 21);
    mlp = random_halves(8 * n * n, size, 22);
    for (size_t i = mlp.size() / 2; i < mlp.size(); ++i) mlp[i] = __float2half(0.5f * __half2float(mlp[i]));
  }
};
inline int64_t layer_weight_bytes(const Geometry& g) { return 24 * int64_t{g.hidden} * g.hidden; }

}  // namespace tandem::test
