// SPDX-License-Identifier: MIT
#include "reference/attention_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/rounding.h"

// The truth is the slow part of every test: where it is safe it is also built for AVX2. Sums are still in double.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && defined(__GNUC__) && \
    !defined(__clang__)
#define REFERENCE_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define REFERENCE_CLONES
#endif

namespace reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// a . b, and the sum of the products' magnitudes, which is what a dot product's rounding error is measured by.
struct Dot {
  double value = 0.0, magnitude = 0.0;
};

REFERENCE_CLONES Dot dot(const double* a, const double* b, int32_t n) {
  double sum = 0.0, magnitude = 0.0;
#pragma omp simd reduction(+ : sum, magnitude)
  for (int32_t i = 0; i < n; ++i) {
    sum += a[i] * b[i];
    magnitude += std::fabs(a[i] * b[i]);
  }
  return {sum, magnitude};
}

REFERENCE_CLONES void accumulate(double weight, const double* v, double* o, double* mass, int32_t n) {
#pragma omp simd
  for (int32_t i = 0; i < n; ++i) {
    o[i] += weight * v[i];
    mass[i] += weight * std::fabs(v[i]);
  }
}

// Rotates one vector and multiplies its rotated dims by the attention factor; T is the arithmetic it is done in.
template <typename T>
void rotate(const RefLayer& layer, int64_t position, T* vector) {
  if (layer.rope == TANDEM_ROPE_CALLER) return;
  const int32_t n_pairs = layer.rotated_dims() / 2;
  for (int32_t i = 0; i < n_pairs; ++i) {
    const double angle = layer.angle(position, i);
    const auto c = static_cast<T>(std::cos(angle) * layer.attn_factor());
    const auto s = static_cast<T>(std::sin(angle) * layer.attn_factor());
    T& a = vector[layer.rope == TANDEM_ROPE_INTERLEAVED ? 2 * i : i];
    T& b = vector[layer.rope == TANDEM_ROPE_INTERLEAVED ? 2 * i + 1 : i + n_pairs];
    const T x = a, y = b;
    a = x * c - y * s;
    b = x * s + y * c;
  }
}

// Angles are the same for every head: rotates all heads of a token at once.
void rotate_heads(const RefLayer& layer, int64_t position, double* vectors, int32_t n_heads) {
  if (layer.rope == TANDEM_ROPE_CALLER) return;
  const int32_t n_pairs = layer.rotated_dims() / 2;
  const bool interleaved = layer.rope == TANDEM_ROPE_INTERLEAVED;
  for (int32_t i = 0; i < n_pairs; ++i) {
    const double angle = layer.angle(position, i);
    const double c = std::cos(angle) * layer.attn_factor(), s = std::sin(angle) * layer.attn_factor();
    for (int32_t head = 0; head < n_heads; ++head) {
      double* vector = vectors + static_cast<int64_t>(head) * layer.k_head_dim;
      double& a = vector[interleaved ? 2 * i : i];
      double& b = vector[interleaved ? 2 * i + 1 : i + n_pairs];
      const double x = a, y = b;
      a = x * c - y * s;
      b = x * s + y * c;
    }
  }
}

// Keys and values in double, keys rotated.
struct Widened {
  std::vector<double> k;  // [n_tokens, n_kv_heads, k_head_dim]
  std::vector<double> v;  // [n_tokens, n_kv_heads, v_head_dim]
};

Widened widen(const LayerRows& rows) {
  const RefLayer& layer = *rows.layer;
  const int64_t k_row = static_cast<int64_t>(layer.n_kv_heads) * layer.k_head_dim;
  const int64_t v_row = static_cast<int64_t>(layer.n_kv_heads) * layer.v_head_dim;
  Widened wide;
  wide.k.assign(rows.k, rows.k + rows.n_tokens * k_row);
  if (rows.v) {
    wide.v.assign(rows.v, rows.v + rows.n_tokens * v_row);
  } else {
    wide.v.resize(static_cast<size_t>(rows.n_tokens * v_row));
    for (int64_t i = 0; i < rows.n_tokens * layer.n_kv_heads; ++i)
      std::copy_n(rows.k + i * layer.k_head_dim, layer.v_head_dim, wide.v.data() + i * layer.v_head_dim);
  }
  for (int64_t j = 0; j < rows.n_tokens; ++j)
    rotate_heads(layer, rows.positions[j], wide.k.data() + j * k_row, layer.n_kv_heads);
  return wide;
}

double capped(const RefLayer& layer, double logit) {
  if (layer.soft_cap <= 0.0f) return logit;
  const double cap = layer.soft_cap;
  return cap * std::tanh(logit / cap);
}

// One (token, head) row of the truth. `weights` holds the logits on entry and the weights on return.
void finish_row(const RefLayer& layer, const Widened& wide, const std::vector<int64_t>& keys, std::vector<double>* weights,
                int64_t row, Truth* truth) {
  const auto q_head = static_cast<int32_t>(row % layer.n_q_heads);
  double largest = layer.sinks.empty() ? -kInfinity : static_cast<double>(layer.sinks[static_cast<size_t>(q_head)]);
  const double sink = largest;
  for (double logit : *weights) largest = std::isnan(logit) ? logit : std::max(largest, logit);  // NaN stays
  double& magnitude = truth->logit_magnitude[static_cast<size_t>(row)];
  if (sink != -kInfinity) magnitude = std::max(magnitude, std::fabs(sink));
  if (largest == -kInfinity) {
    truth->lse[static_cast<size_t>(row)] = -kInfinity;
    return;
  }
  double sum = sink == -kInfinity ? 0.0 : std::exp(sink - largest);
  for (double& weight : *weights) sum += weight = std::exp(weight - largest);
  double* o = truth->o.data() + row * layer.v_head_dim;
  double* mass = truth->mass.data() + row * layer.v_head_dim;
  const int32_t kv_head = q_head / layer.group_size();
  for (size_t i = 0; i < keys.size(); ++i) {
    (*weights)[i] /= sum;
    const double* v = wide.v.data() + (keys[i] * layer.n_kv_heads + kv_head) * layer.v_head_dim;
    accumulate((*weights)[i], v, o, mass, layer.v_head_dim);
  }
  truth->lse[static_cast<size_t>(row)] = largest + std::log(sum);
}

void compare_naive(const LayerRows& rows, const Queries& queries, int64_t row, Truth* truth) {
  const RefLayer& layer = *rows.layer;
  const NaiveRow naive = attend_naive(rows, queries, row / layer.n_q_heads, static_cast<int32_t>(row % layer.n_q_heads));
  const double lse = truth->lse[static_cast<size_t>(row)];
  if (lse == -kInfinity) return;
  truth->naive_lse_error = std::max(truth->naive_lse_error, std::fabs(static_cast<double>(naive.lse) - lse));
  for (int32_t d = 0; d < layer.v_head_dim; ++d) {
    const auto at = static_cast<size_t>(row * layer.v_head_dim + d);
    const double error = std::fabs(static_cast<double>(naive.o[static_cast<size_t>(d)]) - truth->o[at]);
    truth->naive_error = std::max(truth->naive_error, error);
    if (truth->mass[at] > 0.0) truth->naive_mass_share = std::max(truth->naive_mass_share, error / truth->mass[at]);
  }
}

}  // namespace

Truth attend_reference(const LayerRows& rows, const Queries& queries) {
  const RefLayer& layer = *rows.layer;
  const Widened wide = widen(rows);
  const int64_t n_rows = queries.n_tokens * layer.n_q_heads;
  Truth truth;
  truth.n_tokens = queries.n_tokens;
  truth.n_q_heads = layer.n_q_heads;
  truth.v_head_dim = layer.v_head_dim;
  truth.o.assign(static_cast<size_t>(n_rows * layer.v_head_dim), 0.0);
  truth.mass = truth.o;
  truth.lse.assign(static_cast<size_t>(n_rows), -kInfinity);
  truth.logit_magnitude.assign(static_cast<size_t>(n_rows), 0.0);

  std::vector<int64_t> keys;
  std::vector<double> weights, q(static_cast<size_t>(layer.k_head_dim));
  for (int64_t t = 0; t < queries.n_tokens; ++t) {
    for (int32_t kv_head = 0; kv_head < layer.n_kv_heads; ++kv_head) {
      keys.clear();
      queries.visible(t, kv_head, &keys);
      for (int32_t g = 0; g < layer.group_size(); ++g) {
        const int32_t q_head = kv_head * layer.group_size() + g;
        const int64_t row = t * layer.n_q_heads + q_head;
        std::copy_n(queries.q + row * layer.k_head_dim, layer.k_head_dim, q.begin());
        rotate(layer, queries.positions[t], q.data());
        weights.resize(keys.size());
        for (size_t i = 0; i < keys.size(); ++i) {
          const double* k = wide.k.data() + (keys[i] * layer.n_kv_heads + kv_head) * layer.k_head_dim;
          const Dot product = dot(q.data(), k, layer.k_head_dim);
          double& magnitude = truth.logit_magnitude[static_cast<size_t>(row)];
          magnitude = std::max(magnitude, layer.scale() * product.magnitude);
          weights[i] = capped(layer, layer.scale() * product.value);
        }
        finish_row(layer, wide, keys, &weights, row, &truth);
        if (queries.observe) queries.observe(t, q_head, keys, weights.data());
      }
    }
  }
  const int64_t step = std::max<int64_t>(1, queries.naive_rows ? n_rows / queries.naive_rows : n_rows);
  if (queries.naive_rows)
    for (int64_t row = 0; row < n_rows; row += step) compare_naive(rows, queries, row, &truth);
  return truth;
}

NaiveRow attend_naive(const LayerRows& rows, const Queries& queries, int64_t token, int32_t q_head) {
  const RefLayer& layer = *rows.layer;
  const int32_t kv_head = q_head / layer.group_size(), k_dim = layer.k_head_dim, v_dim = layer.v_head_dim;
  std::vector<int64_t> keys;
  queries.visible(token, kv_head, &keys);
  const float* from = queries.q + (token * layer.n_q_heads + q_head) * k_dim;
  std::vector<float> q(from, from + k_dim), k(static_cast<size_t>(k_dim)), logits(keys.size());
  rotate(layer, queries.positions[token], q.data());

  const auto scale = static_cast<float>(layer.scale());
  float largest = layer.sinks.empty() ? -std::numeric_limits<float>::infinity() : layer.sinks[static_cast<size_t>(q_head)];
  const float sink = largest;
  for (size_t i = 0; i < keys.size(); ++i) {
    std::copy_n(rows.k + (keys[i] * layer.n_kv_heads + kv_head) * k_dim, k_dim, k.begin());
    rotate(layer, rows.positions[keys[i]], k.data());
    float sum = 0.0f;
    for (int32_t d = 0; d < k_dim; ++d) sum += q[static_cast<size_t>(d)] * k[static_cast<size_t>(d)];
    float logit = scale * sum;
    if (layer.soft_cap > 0.0f) logit = layer.soft_cap * std::tanh(logit / layer.soft_cap);
    logits[i] = logit;
    largest = std::max(largest, logit);
  }
  NaiveRow row;
  row.o.assign(static_cast<size_t>(v_dim), 0.0f);
  row.lse = -std::numeric_limits<float>::infinity();
  if (largest == row.lse) return row;
  float sum = sink == row.lse ? 0.0f : std::exp(sink - largest);
  for (size_t i = 0; i < keys.size(); ++i) {
    const float weight = std::exp(logits[i] - largest);
    const float p = queries.naive_rounds_p ? static_cast<float>(round_to(layer.v_type, weight)) : weight;
    const int64_t at = keys[i] * layer.n_kv_heads + kv_head;
    const float* v = rows.v ? rows.v + at * v_dim : rows.k + at * k_dim;
    for (int32_t d = 0; d < v_dim; ++d) row.o[static_cast<size_t>(d)] += p * v[d];
    sum += weight;
  }
  for (float& x : row.o) x /= sum;
  row.lse = largest + std::log(sum);
  return row;
}

}  // namespace reference
