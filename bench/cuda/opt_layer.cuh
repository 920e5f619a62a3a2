// SPDX-License-Identifier: MIT
// Attention layers of OPT-6.7B and OPT-13B (32 and 40 heads of 128, hidden states of 4,096 and 5,120; layer norm, biases, no
// RoPE) in f16. The benches' own kernels make K and V in double precision, from random hidden states and weights.
#pragma once

#include <cuda_fp16.h>

#include "cuda/hybrid_case.h"
#include "reference/stored_row.h"

namespace tandem::test {

inline constexpr int32_t kHeadDim = 128;
inline constexpr int64_t kUniqueTokens = 1024;  // sequences begin at different tokens among these
inline constexpr float kEps = 1e-5f;
inline int64_t first_token(int64_t sequence) { return sequence * 37 % kUniqueTokens; }

struct Geometry {
  const char* name;
  int32_t n_heads, hidden;
};
inline constexpr Geometry kGeometries[] = {{"opt-6.7b", 32, 4096}, {"opt-13b", 40, 5120}};

inline std::vector<__half> random_halves(int64_t n, float size, uint64_t seed) {
  std::vector<__half> numbers(static_cast<size_t>(n));
  std::mt19937_64 bits(seed);
  for (size_t i = 0; i < numbers.size(); ++i) {  // sums of four bytes: nearly normal
    const uint64_t word = bits();
    const int sum = static_cast<int>((word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24 & 255)) - 510;
    numbers[i] = __float2half(size * static_cast<float>(sum) / 148.0f);
  }
  return numbers;
}

template <class T>
struct OnDevice {
  T* data = nullptr;
  explicit OnDevice(const std::vector<T>& from) {
    must(cudaMalloc(&data, from.size() * sizeof(T)));
    must(cudaMemcpy(data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(data); }
};

// Normalises rows in double precision and rounds them to f16, as the projection does. A thread has a row.
static __global__ void normalise(const __half* x, __half* to, int hidden, int n_rows) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= n_rows) return;
  double mean = 0.0, square = 0.0;
  for (int i = 0; i < hidden; ++i) mean += static_cast<double>(__half2float(x[int64_t{row} * hidden + i])) / hidden;
  for (int i = 0; i < hidden; ++i) {
    const double d = static_cast<double>(__half2float(x[int64_t{row} * hidden + i])) - mean;
    square += d * d / hidden;
  }
  for (int i = 0; i < hidden; ++i) {
    const double d = static_cast<double>(__half2float(x[int64_t{row} * hidden + i])) - mean;
    to[int64_t{row} * hidden + i] = __double2half(d / sqrt(square + static_cast<double>(kEps)));
  }
}

// y = x W^T + b in double precision, rounded to f16; W is [n_out, hidden].
static __global__ void project(const __half* x, const __half* w, const float* b, __half* y, int hidden, int n_out) {
  const int j = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), row = static_cast<int>(blockIdx.y);
  if (j >= n_out) return;
  double sum = static_cast<double>(b[j]);
  const auto* one = reinterpret_cast<const __half2*>(x + int64_t{row} * hidden);
  const auto* weights = reinterpret_cast<const __half2*>(w + int64_t{j} * hidden);
  for (int i = 0; i < hidden / 2; ++i) {
    const float2 a = __half22float2(one[i]), c = __half22float2(weights[i]);
    sum += static_cast<double>(a.x) * static_cast<double>(c.x) + static_cast<double>(a.y) * static_cast<double>(c.y);
  }
  y[int64_t{row} * n_out + j] = __double2half(sum);
}

// A layer, and K and V of kUniqueTokens hidden states, stored twice, so that any consecutive ones are contiguous.
struct OptLayer {
  const Geometry& geometry;
  std::vector<__half> w_k, w_v, x, k, v;
  std::vector<float> b;

  // x_type: hidden states are rounded to this type.
  explicit OptLayer(const Geometry& of, int32_t x_type = TANDEM_F16) : geometry(of) {
    const int64_t n_out = int64_t{of.n_heads} * kHeadDim, hidden = of.hidden;
    const float size = 1.0f / std::sqrt(static_cast<float>(hidden));
    w_k = random_halves(n_out * hidden, size, 1);
    w_v = random_halves(n_out * hidden, size, 2);
    for (int64_t i = 0; i < n_out; ++i) b.push_back(0.01f * static_cast<float>(i % 17 - 8));
    x = random_halves(kUniqueTokens * hidden, 2.0f, 3);
    if (x_type != TANDEM_F16) round_rows(x_type);
    const OnDevice<__half> x_there(x), w_k_there(w_k), w_v_there(w_v), normed(x);
    const OnDevice<float> b_there(b);
    normalise<<<(kUniqueTokens + 63) / 64, 64>>>(x_there.data, normed.data, of.hidden, kUniqueTokens);
    for (const bool is_k : {true, false}) {
      std::vector<__half>& y = is_k ? k : v;
      y.resize(static_cast<size_t>(kUniqueTokens * n_out));
      const OnDevice<__half> made(y);
      project<<<dim3(static_cast<unsigned>((n_out + 127) / 128), kUniqueTokens), 128>>>(
          normed.data, is_k ? w_k_there.data : w_v_there.data, b_there.data, made.data, of.hidden, static_cast<int>(n_out));
      must(cudaMemcpy(y.data(), made.data, y.size() * 2, cudaMemcpyDeviceToHost));
    }
    for (std::vector<__half>* rows : {&x, &k, &v}) {
      rows->reserve(2 * rows->size());
      std::copy_n(rows->begin(), rows->size(), std::back_inserter(*rows));
    }
  }

 private:
  void round_rows(int32_t x_type) {
    std::vector<double> row(static_cast<size_t>(geometry.hidden));
    for (auto first = x.begin(); first != x.end(); first += geometry.hidden) {
      std::transform(first, first + geometry.hidden, row.begin(), [](__half one) { return __half2float(one); });
      reference::round_row(x_type, row.data(), geometry.hidden);
      std::transform(row.begin(), row.end(), first, [](double one) { return __double2half(one); });
    }
  }
};

// Everything but W_K and W_V.
inline tandem_layer_projection projection_of(const OptLayer& layer) {
  tandem_layer_projection projection = TANDEM_LAYER_PROJECTION_INIT;
  projection.hidden_dim = layer.geometry.hidden;
  projection.w_type = TANDEM_F16;
  projection.w_order = TANDEM_WEIGHTS_OUT_IN;
  projection.norm = TANDEM_NORM_LAYER;
  projection.norm_eps = kEps;
  projection.b_k = projection.b_v = layer.b.data();
  return projection;
}

inline tandem_tensor half_tensor(void* data, std::vector<int64_t> shape, bool on_device) {
  tandem_tensor tensor;
  TANDEM(tandem_tensor_init, &tensor, TANDEM_F16, data, static_cast<int32_t>(shape.size()), shape.data());
  tensor.device_type = on_device ? TANDEM_DEVICE_CUDA : TANDEM_DEVICE_HOST;
  return tensor;
}

inline double distance(const std::vector<__half>& a, const std::vector<__half>& b) {
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(__half2float(a[i]) - __half2float(b[i]), 2);
    size += std::pow(__half2float(b[i]), 2);
  }
  return std::sqrt(error / size);
}

}  // namespace tandem::test
