// SPDX-License-Identifier: MIT
// An hgca session's knowledge of one sequence, computed the slow way: every moving average in double, every query counted
// when it comes.
//
//   decode   (one query, or a speculative tree) attends sinks, selected keys and the window. Its weights count for the
//            keys in the window.
//   append   (several queries) attends everything. The weights of its n queries count for every key, one after another;
//            then every key outside the window is judged anew. A chunk marked partial leaves that to the last one, or to
//            the first call that needs the selection.
//   evict    the window grows to window + block - 1 tokens and then evicts whole blocks. A block is an eighth of the
//            window, at least 1 token and at most a page. In decode only the evicted tokens are judged.
//   halo     a kept key with a MAW above 0.01 also keeps the halo_tokens keys after it.
//
// Layers with a sliding window of their own attend all of it and keep nothing here.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/reference_layer.h"

namespace reference {

struct HgcaOptions {
  int64_t window_tokens = 0;
  int64_t sink_tokens = 0;
  float alpha = 0.3f;
  float beta = 0.5f;
  int64_t page_tokens = 128;
  int64_t halo_tokens = 0;
};

// Weights of one query over all tokens.
struct QueryWeights {
  int64_t end = 0;                           // number of tokens visible to the query, its own included
  std::vector<std::vector<double>> by_head;  // [n_q_heads][end]
};

class HgcaModel {
 public:
  HgcaModel(const std::vector<RefLayer>* layers, const HgcaOptions& options);

  bool keeps(size_t layer) const { return (*layers_)[layer].sliding_window == 0; }
  // Returns whether a query that does not attend everything sees the token.
  bool attended(size_t layer, int32_t kv_head, int64_t token) const;

  void before_decode(size_t layer) { settle_pending(layer); }  // selections are due at this point
  void after_decode(size_t layer, const QueryWeights& weights, int64_t length);
  void after_append(size_t layer, std::vector<QueryWeights> weights, int64_t length, bool partial);
  void count_pending(size_t layer);  // partial chunks on a device count at once and are judged later
  // Commits tokens of a tree. kept: the weights of each kept query over the committed tokens, then over the kept ones up to
  // itself.
  void after_commit(size_t layer, const std::vector<QueryWeights>& kept, int64_t length_before);
  void truncate(int64_t n_tokens);
  void remove(int64_t first, int64_t n_tokens, int64_t length);
  void settle_all();  // called before a fork or a removal

  // Keys that the rule selects, one by one. Each key's value is compared with the threshold of the last judgement.
  const std::vector<int64_t>& selected(size_t layer, int32_t kv_head) const;
  // Keys within a relative 1e-4 of the threshold at the last judgement, or within the f32 error of a MAW. Either result is
  // right for them.
  const std::vector<int64_t>& uncertain(size_t layer, int32_t kv_head) const;
  void adopt(size_t layer, int32_t kv_head, const std::vector<int64_t>& selection);
  double maw(size_t layer, int32_t q_head, int64_t token) const;
  int64_t window_begin(size_t layer) const { return states_[layer].window_begin; }
  int64_t sink_end(size_t layer) const;

 private:
  struct Head {
    std::vector<int64_t> selected, uncertain;  // ascending
  };
  struct State {
    int64_t window_begin = 0;
    std::vector<std::vector<double>> maw;  // [n_q_heads][tokens]
    std::vector<Head> heads;               // [n_kv_heads]
    bool due = false;                      // a re-evaluation is due, after partial chunks
    std::vector<QueryWeights> pending;     // of partial chunks
  };
  void count(size_t layer, const QueryWeights& weights, int64_t first_token);
  void judge(size_t layer, int64_t begin, int64_t end, bool eviction);
  void evict(size_t layer, int64_t length);
  void settle_pending(size_t layer);
  void re_evaluate(size_t layer);

  const std::vector<RefLayer>* layers_;
  HgcaOptions options_;
  std::vector<State> states_;
};

}  // namespace reference
