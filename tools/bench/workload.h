// SPDX-License-Identifier: MIT
// The model, cache and session that are measured, with their inputs.
//
// A step is that of a decode loop: tandem_step_begin(), one tandem_attend() per layer, tandem_step_end(). There are enough
// layers for K and V of all of them to be several times the last-level cache. So no key is still in a cache when its turn
// comes again. K and V are normal random numbers, different in every page. The queries of a head share a direction and are
// scaled so that logits have a standard deviation of kLogitDeviation. So weights are as uneven as in real models, and the
// same keys matter from token to token, which policies that select rely on.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tools/bench/bench_options.h"
#include "tools/common/handles.h"
#include "tools/common/result.h"

namespace tools {

struct Case {
  int64_t kv_len = 0;  // keys that the last query sees; the mean if sequences are ragged
  int64_t q_len = 1;
  int32_t kv_type = 0;
  int32_t n_layers = 1;
};

class Workload {
 public:
  // Succeeds if the library supports such a layer, cache and session. Else fails with the library's reason.
  static Result check_supported(const tandem_engine* engine, const BenchOptions& options, int32_t kv_type);

  // Creates the objects. Takes no memory for tokens yet.
  static Result create(tandem_engine* engine, const BenchOptions& options, const Case& geometry,
                       std::unique_ptr<Workload>* workload);

  // Fills every sequence and layer to kv_len - q_len tokens and reserves pages for n_tokens more. Appends the last tokens by
  // attend calls, because policies that select must see queries.
  Result fill(int64_t n_tokens);
  Result step_begin() { return step_begin(case_.q_len); }
  Result attend(int32_t layer_idx) { return attend(layer_idx, case_.q_len, true); }  // the timed call
  Result step_end();
  // Attends the last token of every sequence again. Appends nothing.
  Result attend_again(int32_t layer_idx) { return attend(layer_idx, 1, false); }
  Result truncate();  // back to kv_len - q_len tokens
  Result stats(tandem_session_stats* stats) const;

  const Case& geometry() const { return case_; }
  int64_t kv_len(int64_t sequence_idx) const {
    return options_.ragged ? case_.kv_len / options_.batch * (2 * sequence_idx + 1) : case_.kv_len;
  }
  const BenchOptions& options() const { return options_; }
  tandem_cache* cache() const { return cache_.get(); }
  tandem_session* session() const { return session_.get(); }
  // True if the session's policy, by its documentation, selects keys in calls of one query.
  bool selects_keys() const { return options_.policy == "hgca"; }
  int64_t sequence(int64_t sequence_idx) const { return sequences_[static_cast<size_t>(sequence_idx)]; }
  // Row `token` (over the whole batch) of one query head: the input and the output of the last attend().
  const float* q_row(int64_t token, int64_t q_head) const;        // [head_dim]
  std::vector<float> o_row(int64_t token, int64_t q_head) const;  // [v_head_dim]
  float lse(int64_t token, int64_t q_head) const { return lse_[static_cast<size_t>(token * options_.n_q_heads + q_head)]; }

 private:
  // Contiguous rows in the input type.
  struct Rows {
    int64_t row_elements = 0;
    std::vector<uint8_t> bytes;
  };
  Workload(tandem_engine* engine, const BenchOptions& options, const Case& geometry)
      : options_(options), case_(geometry), engine_(engine) {}
  Result create_objects();
  void make_inputs();
  Rows random_rows(int64_t n_rows, int64_t row_elements, uint64_t seed) const;
  tandem_tensor tensor(Rows* rows, int64_t first_row, int64_t n_rows, int64_t n_heads) const;
  Result step_begin(int64_t q_len);
  Result attend(int32_t layer_idx, int64_t q_len, bool append);
  Result observe(int64_t n_tokens);
  Result fill_layer(int64_t sequence_idx, int32_t layer_idx, int64_t n_tokens);

  BenchOptions options_;
  Case case_;
  tandem_engine* engine_ = nullptr;
  Model model_;
  Cache cache_;
  Session session_;
  std::vector<int64_t> sequences_, q_lens_;
  Rows k_pool_, v_pool_;      // the tokens that fill_layer() appends
  Rows q_, o_;                // [batch * q_len, n_q_heads, ...]
  std::vector<float> q_f32_;  // the exact values of q, for the reference
  std::vector<float> lse_;
};

}  // namespace tools
