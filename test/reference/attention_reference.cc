// SPDX-License-Identifier: MIT
#include "reference/attention_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/rounding.h"
#include "reference/stored_row.h"

// The truth is the slow part of every test. Where it is safe, it is also built for AVX2. Sums are still in double.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && defined(__GNUC__) && \
    !defined(__clang__)
#define REFERENCE_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define REFERENCE_CLONES
#endif

namespace reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// a . b, and the sum of the products' magnitudes, which scales the rounding error of a dot product.
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

// RoPE of one layer: cos and sin of each pair's angle at a position, times the attention factor. They are computed in
// double, once for each token, because all heads share them. T is the arithmetic of the rotation itself.
class Rope {
 public:
  explicit Rope(const RefLayer& layer) : layer_(layer), on_(layer.rope != TANDEM_ROPE_CALLER) {
    for (int32_t i = 0; on_ && i < layer.rotated_dims() / 2; ++i) frequencies_.push_back(layer.frequency(i));
    cos_.resize(frequencies_.size());
    sin_.resize(frequencies_.size());
  }
  bool on() const { return on_; }

  void go_to(int64_t position) {
    const double scaled = layer_.scaled(position), factor = layer_.attn_factor();
    for (size_t i = 0; i < frequencies_.size(); ++i) {
      const double angle = scaled * frequencies_[i];
      cos_[i] = std::cos(angle) * factor;
      sin_[i] = std::sin(angle) * factor;
    }
  }

  template <typename T>
  void rotate(T* vector) const {
    const bool interleaved = layer_.rope == TANDEM_ROPE_INTERLEAVED;
    const size_t n = frequencies_.size();
    for (size_t i = 0; i < n; ++i) {
      const auto c = static_cast<T>(cos_[i]), s = static_cast<T>(sin_[i]);
      T& a = vector[interleaved ? 2 * i : i];
      T& b = vector[interleaved ? 2 * i + 1 : i + n];
      const T x = a, y = b;
      a = x * c - y * s;
      b = x * s + y * c;
    }
  }

 private:
  const RefLayer& layer_;
  const bool on_;
  std::vector<double> frequencies_, cos_, sin_;
};

// Rotates each copy of the keys in its own arithmetic.
template <typename... T>
void rotate_keys(const LayerRows& rows, T*... copies) {
  const RefLayer& layer = *rows.layer;
  Rope rope(layer);
  if (!rope.on()) return;
  for (int64_t j = 0; j < rows.n_tokens; ++j) {
    rope.go_to(rows.positions[j]);
    for (int64_t head = 0; head < layer.n_kv_heads; ++head)
      (rope.rotate(copies + (j * layer.n_kv_heads + head) * layer.k_head_dim), ...);
  }
}

int64_t n_key_elements(const LayerRows& rows) { return rows.n_tokens * rows.layer->n_kv_heads * rows.layer->k_head_dim; }

// Keys (rotated) and values in double, and the keys of the plain computation.
struct Widened {
  std::vector<double> k;     // [n_tokens, n_kv_heads, k_head_dim]
  std::vector<double> v;     // [n_tokens, n_kv_heads, v_head_dim]
  std::vector<float> k_f32;  // like k, empty unless requested
};

Widened widen(const LayerRows& rows, bool f32_too) {
  const RefLayer& layer = *rows.layer;
  const int64_t v_row = static_cast<int64_t>(layer.n_kv_heads) * layer.v_head_dim;
  Widened wide;
  wide.k.assign(rows.k, rows.k + n_key_elements(rows));
  if (rows.v) {
    wide.v.assign(rows.v, rows.v + rows.n_tokens * v_row);
  } else {
    wide.v.resize(static_cast<size_t>(rows.n_tokens * v_row));
    for (int64_t i = 0; i < rows.n_tokens * layer.n_kv_heads; ++i)
      std::copy_n(rows.k + i * layer.k_head_dim, layer.v_head_dim, wide.v.data() + i * layer.v_head_dim);
  }
  if (f32_too) {
    wide.k_f32.assign(rows.k, rows.k + n_key_elements(rows));
    rotate_keys(rows, wide.k.data(), wide.k_f32.data());
  } else {
    rotate_keys(rows, wide.k.data());
  }
  return wide;
}

double capped(const RefLayer& layer, double logit) {
  if (layer.soft_cap <= 0.0f) return logit;
  const double cap = layer.soft_cap;
  return cap * std::tanh(logit / cap);
}

// Computes one (token, head) row of the truth. `weights` holds the logits on entry and the weights on return.
void finish_row(const RefLayer& layer, const Widened& wide, const std::vector<int64_t>& keys, std::vector<double>* weights,
                int64_t row, Truth* truth) {
  const auto q_head = static_cast<int32_t>(row % layer.n_q_heads);
  double largest = layer.sinks.empty() ? -kInfinity : static_cast<double>(layer.sinks[static_cast<size_t>(q_head)]);
  const double sink = largest;
  for (double logit : *weights) largest = std::isnan(logit) ? logit : std::max(largest, logit);  // a NaN stays
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

// The plain computation of consecutive rows. `k` holds the rotated keys.
class Naive {
 public:
  Naive(const LayerRows& rows, const Queries& queries, const float* k)
      : rows_(rows), queries_(queries), k_(k), rope_(*rows.layer) {
    if (!queries.naive_rounds_p || !has_groups(rows.layer->v_type) || rows.v == nullptr) return;
    std::vector<double> rounded(rows.v, rows.v + rows.n_tokens * rows.layer->n_kv_heads * rows.layer->v_head_dim);
    round_all(TANDEM_F16, rounded.data(), static_cast<int64_t>(rounded.size()));
    rounded_v_.assign(rounded.begin(), rounded.end());
    rows_.v = rounded_v_.data();
  }

  NaiveRow row(int64_t token, int32_t q_head) {
    const RefLayer& layer = *rows_.layer;
    const int32_t kv_head = q_head / layer.group_size();
    see(token, kv_head);
    form_logits(token, q_head);
    NaiveRow row;
    row.o.assign(static_cast<size_t>(layer.v_head_dim), 0.0f);
    row.lse = -std::numeric_limits<float>::infinity();
    const float sink = layer.sinks.empty() ? row.lse : layer.sinks[static_cast<size_t>(q_head)];
    float largest = sink;
    for (float logit : logits_) largest = std::max(largest, logit);
    if (largest == row.lse) return row;
    float sum = sink == row.lse ? 0.0f : std::exp(sink - largest);
    const int32_t p_type = layer.v_type == TANDEM_F32 || layer.v_type == TANDEM_BF16 ? layer.v_type : TANDEM_F16;
    for (size_t i = 0; i < keys_.size(); ++i) {
      const float weight = std::exp(logits_[i] - largest);
      const float p = queries_.naive_rounds_p ? static_cast<float>(round_to(p_type, weight)) : weight;
      const int64_t at = keys_[i] * layer.n_kv_heads + kv_head;
      const float* v = rows_.v ? rows_.v + at * layer.v_head_dim : rows_.k + at * layer.k_head_dim;
      for (int32_t d = 0; d < layer.v_head_dim; ++d) row.o[static_cast<size_t>(d)] += p * v[d];
      sum += weight;
    }
    for (float& x : row.o) x /= sum;
    row.lse = largest + std::log(sum);
    return row;
  }

 private:
  // The heads of a group see the same keys.
  void see(int64_t token, int32_t kv_head) {
    if (token == token_ && kv_head == kv_head_) return;
    token_ = token;
    kv_head_ = kv_head;
    keys_.clear();
    queries_.visible(token, kv_head, &keys_);
  }

  void form_logits(int64_t token, int32_t q_head) {
    const RefLayer& layer = *rows_.layer;
    const int32_t dim = layer.k_head_dim;
    const float* from = queries_.q + (token * layer.n_q_heads + q_head) * dim;
    q_.assign(from, from + dim);
    rope_.go_to(queries_.positions[token]);
    rope_.rotate(q_.data());
    const auto scale = static_cast<float>(layer.scale());
    logits_.clear();
    for (int64_t key : keys_) {
      const float* k = k_ + (key * layer.n_kv_heads + kv_head_) * dim;
      float sum = 0.0f;
      for (int32_t d = 0; d < dim; ++d) sum += q_[static_cast<size_t>(d)] * k[d];
      const float logit = scale * sum;
      logits_.push_back(layer.soft_cap > 0.0f ? layer.soft_cap * std::tanh(logit / layer.soft_cap) : logit);
      if (queries_.bias) logits_.back() += static_cast<float>(queries_.bias(token, q_head, key));
    }
  }

  LayerRows rows_;
  const Queries& queries_;
  const float* k_;
  std::vector<float> rounded_v_;  // if V is rounded
  Rope rope_;
  int64_t token_ = -1;
  int32_t kv_head_ = -1;
  std::vector<int64_t> keys_;  // the visible keys
  std::vector<float> q_, logits_;
};

void compare_naive(const RefLayer& layer, const NaiveRow& naive, int64_t row, Truth* truth) {
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
  const Widened wide = widen(rows, queries.naive_rows > 0);
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
  Rope rope(layer);
  for (int64_t t = 0; t < queries.n_tokens; ++t) {
    rope.go_to(queries.positions[t]);
    for (int32_t kv_head = 0; kv_head < layer.n_kv_heads; ++kv_head) {
      keys.clear();
      queries.visible(t, kv_head, &keys);
      for (int32_t g = 0; g < layer.group_size(); ++g) {
        const int32_t q_head = kv_head * layer.group_size() + g;
        const int64_t row = t * layer.n_q_heads + q_head;
        std::copy_n(queries.q + row * layer.k_head_dim, layer.k_head_dim, q.begin());
        rope.rotate(q.data());
        weights.resize(keys.size());
        for (size_t i = 0; i < keys.size(); ++i) {
          const double* k = wide.k.data() + (keys[i] * layer.n_kv_heads + kv_head) * layer.k_head_dim;
          const Dot product = dot(q.data(), k, layer.k_head_dim);
          double& magnitude = truth.logit_magnitude[static_cast<size_t>(row)];
          magnitude = std::max(magnitude, layer.scale() * product.magnitude);
          weights[i] = capped(layer, layer.scale() * product.value);
          if (queries.bias) weights[i] += queries.bias(t, q_head, keys[i]);
        }
        finish_row(layer, wide, keys, &weights, row, &truth);
        if (queries.observe) queries.observe(t, q_head, keys, weights.data());
      }
    }
  }
  if (queries.naive_rows == 0) return truth;
  Naive naive(rows, queries, wide.k_f32.data());
  for (int64_t row = 0; row < n_rows; row += std::max<int64_t>(1, n_rows / queries.naive_rows))
    compare_naive(layer, naive.row(row / layer.n_q_heads, static_cast<int32_t>(row % layer.n_q_heads)), row, &truth);
  return truth;
}

NaiveRow attend_naive(const LayerRows& rows, const Queries& queries, int64_t token, int32_t q_head) {
  std::vector<float> k(rows.k, rows.k + n_key_elements(rows));
  rotate_keys(rows, k.data());
  return Naive(rows, queries, k.data()).row(token, q_head);
}

}  // namespace reference
