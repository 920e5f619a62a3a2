// SPDX-License-Identifier: MIT
// A simple model of a cache as the header describes it: every sequence is a vector of tokens for each layer.
//
// Rows are kept as stored, rounded once by reference/rounding.h. A forked sequence is a copy. Speculative tokens follow the
// committed ones and have parents. A token's *place* is its index in the sequence that results from accepting only that
// token and its ancestors. Windows are counted in places, so a branch sees exactly what it would see if its tokens were
// appended one by one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "reference/attention_reference.h"
#include "reference/reference_layer.h"

namespace reference {

// The keys that a session attends, beyond causality and a layer's own sliding window.
struct Scope {
  bool streaming = false;
  int64_t window_tokens = 0;
  int64_t sink_tokens = 0;
};

// Additions of a sparse policy: the tokens that a KV head attends, and a listener for the weights.
struct AttendHooks {
  std::function<bool(int32_t kv_head, int64_t token)> attended;
  std::function<void(int64_t token, int32_t q_head, const std::vector<int64_t>& keys, const double* weights)> observe;
  bool naive_rounds_p = false;
  // Returns whether the caller names the key for query token t of the call. With plus_scope, keys of `scope` are attended
  // as well.
  std::function<bool(int64_t t, int32_t kv_head, int64_t key)> named;
  bool plus_scope = false;
};
// Fewest rows of a matmul. Engines under test get this number as matmul_rows.
inline constexpr int32_t kMatmulRows = 24;

// Returns whether a call multiplies bf16 numbers: bf16 queries, bf16 values and enough rows for a matmul.
bool rounds_p(const RefLayer& layer, int32_t q_type, int64_t q_len);

class SequenceModel {
 public:
  explicit SequenceModel(const std::vector<RefLayer>* layers) : layers_(layers), rows_(layers->size()) {}

  int64_t length(size_t layer) const { return rows_[layer].n_tokens; }  // committed
  int64_t n_pending() const { return static_cast<int64_t>(parents_.size()); }
  int64_t pending_in(size_t layer) const { return rows_[layer].n_pending; }
  bool even() const;
  int64_t shortest() const;

  // k: [n_tokens, n_kv_heads, k_head_dim] in any precision, rounded here. v: the same with v_head_dim, ignored where V
  // aliases K.
  void append(size_t layer, int64_t n_tokens, const double* k, const double* v);
  // Appends speculative tokens. parents: [n_tokens], or null for a chain.
  void append_pending(size_t layer, int64_t n_tokens, const double* k, const double* v, const int32_t* parents);
  void commit(const std::vector<int64_t>& kept);
  void truncate(int64_t n_tokens);
  void remove(int64_t first, int64_t n_tokens, bool shift_positions);
  // Restores the given lengths of the layers, after an incomplete step.
  void roll_back(const std::vector<int64_t>& lengths);

  // Computes the truth for the last q_len tokens of a layer, pending ones included. q: [q_len, n_q_heads, k_head_dim].
  Truth attend(size_t layer, int64_t q_len, const float* q, const Scope& scope, int64_t naive_rows = 64,
               const AttendHooks& hooks = {}) const;
  // Lists the keys that query token `index` (committed, then pending) of a layer sees, ascending.
  void visible(size_t layer, int64_t index, const Scope& scope, std::vector<int64_t>* keys) const;

  LayerRows layer_rows(size_t layer) const;  // committed, then pending
  const std::vector<float>& k(size_t layer) const { return rows_[layer].k; }
  const std::vector<float>& v(size_t layer) const { return rows_[layer].v; }
  int64_t position(int64_t index) const { return positions_[static_cast<size_t>(index)]; }
  // Returns everything that the digest covers, as bytes. Strings are equal exactly when contents are equal.
  std::string content() const;

 private:
  struct Rows {
    int64_t n_tokens = 0;
    int64_t n_pending = 0;
    std::vector<float> k, v;  // as stored
  };
  void push_rows(size_t layer, int64_t n_tokens, const double* k, const double* v);
  void cut(size_t layer, int64_t n_tokens);
  void drop_pending();
  void grow_positions();
  int64_t longest() const;
  int64_t k_row(size_t layer) const;
  int64_t v_row(size_t layer) const;
  int64_t place(size_t layer, int64_t index) const;

  const std::vector<RefLayer>* layers_;
  std::vector<Rows> rows_;
  std::vector<int64_t> positions_;  // of the longest layer, pending tokens included
  std::vector<int32_t> parents_;    // of pending tokens; -1: the last committed token
};

}  // namespace reference
