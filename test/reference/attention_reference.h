// SPDX-License-Identifier: MIT
// Computes attention twice: in double precision, the truth, and in plain f32, which shows how exact f32 can be.
//
// Both read the rows as stored. The truth uses K and V widened to double and rotated by angles computed in double. The
// plain version forms each logit by one loop in f32, subtracts the maximum, sums in the order of the keys and divides last.
// Many queries with bf16 queries and values are usually computed with products of bf16 numbers, so the plain version can
// also round its weights. The caller decides which keys a query sees: a list for each query token and KV head.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "reference/reference_layer.h"

namespace reference {

// Rows of one layer of one sequence, as stored and widened to f32.
struct LayerRows {
  const RefLayer* layer = nullptr;
  int64_t n_tokens = 0;
  const float* k = nullptr;            // [n_tokens, n_kv_heads, k_head_dim]
  const float* v = nullptr;            // [n_tokens, n_kv_heads, v_head_dim]; null where V aliases K
  const int64_t* positions = nullptr;  // [n_tokens]
};

struct Queries {
  int64_t n_tokens = 0;
  const float* q = nullptr;            // [n_tokens, n_q_heads, k_head_dim]
  const int64_t* positions = nullptr;  // [n_tokens]
  std::function<void(int64_t token, int32_t kv_head, std::vector<int64_t>* keys)> visible;
  // Optional. Added to the logit of a key after the soft cap.
  std::function<double(int64_t token, int32_t q_head, int64_t key)> bias;
  // Optional. Called once for each query token and head with the softmax weights of the visible keys.
  std::function<void(int64_t token, int32_t q_head, const std::vector<int64_t>& keys, const double* weights)> observe;
  int64_t naive_rows = 64;  // largest number of (token, head) rows that are also computed in f32
  // The f32 computation rounds weights to V's type before they are multiplied by V, and to f16 if V's type has fewer bits.
  // It also rounds numbers of a type with groups. Sum and lse are not rounded.
  bool naive_rounds_p = false;
};

struct Truth {
  int64_t n_tokens = 0;
  int32_t n_q_heads = 0;
  int32_t v_head_dim = 0;
  std::vector<double> o;     // [n_tokens, n_q_heads, v_head_dim]
  std::vector<double> mass;  // sum of weight * |v|, same shape
  std::vector<double> lse;   // [n_tokens, n_q_heads]
  // For each row, the largest sm_scale * sum |q_i k_i| over its keys, or |sink|. The error of f32 logits is relative to it.
  std::vector<double> logit_magnitude;  // [n_tokens, n_q_heads]
  double naive_error = 0.0;             // max |naive - o| over the rows computed in f32
  double naive_mass_share = 0.0;        // max |naive - o| / mass over the same rows
  double naive_lse_error = 0.0;
};

Truth attend_reference(const LayerRows& rows, const Queries& queries);

// One row of the plain f32 computation: o [v_head_dim] and lse. Public for tests of the oracle itself.
struct NaiveRow {
  std::vector<float> o;
  float lse = 0.0f;
};
NaiveRow attend_naive(const LayerRows& rows, const Queries& queries, int64_t token, int32_t q_head);

}  // namespace reference
