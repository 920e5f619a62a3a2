// SPDX-License-Identifier: MIT
// Shared by the tests of policy "hip": pruning records, caches with a second session on one engine, calls of several
// sequences, and logits of single keys as attention itself returns them.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "api_world.h"

namespace tandem_test {

inline tandem_pruning_stage stage_of(int32_t judge, int64_t chunk_tokens, int64_t keep_tokens, int64_t interval = 0,
                                     int32_t query_block = 0) {
  tandem_pruning_stage stage = TANDEM_PRUNING_STAGE_INIT;
  stage.judge = judge;
  stage.chunk_tokens = chunk_tokens;
  stage.keep_tokens = keep_tokens;
  stage.refresh_interval = interval;
  stage.query_block = query_block;
  return stage;
}

// Options of a session with policy "hip" and one record for all calls and layers.
struct Pruned {
  std::vector<tandem_pruning_stage> stages;
  tandem_pruning_record record = TANDEM_PRUNING_RECORD_INIT;
  tandem_pruning pruning = TANDEM_PRUNING_INIT;
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;

  Pruned(int64_t sink_tokens, int64_t window_tokens, std::vector<tandem_pruning_stage> of) : stages(std::move(of)) {
    record.sink_tokens = sink_tokens;
    record.window_tokens = window_tokens;
    record.stages = stages.data();
    record.n_stages = std::ssize(stages);
    pruning.decode = pruning.append = &record;
    pruning.n_decode = pruning.n_append = 1;
    options.policy = "hip";
    options.pruning = &pruning;
  }
  Pruned(const Pruned&) = delete;
};

// Returns stages that keep every chunk.
inline std::vector<tandem_pruning_stage> keeping_stages(int32_t first_judge, int32_t last_judge) {
  return {stage_of(first_judge, 16, 1 << 20, 6), stage_of(last_judge, 8, 1 << 20, 3, 32)};
}

inline tandem_session_options dense_options() {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = "all";
  return options;
}

struct Machine {
  tandem_engine* engine = nullptr;
  std::vector<tandem_layer_options> layers;
  tandem_model* model = nullptr;

  explicit Machine(std::vector<tandem_layer_options> of = {plain_layer()}, int32_t n_threads = 2,
                   const tandem_engine_options* options = nullptr)
      : layers(std::move(of)) {
    tandem_engine_options small = options != nullptr ? *options : small_engine_options();
    small.n_threads = n_threads;
    small.matmul_rows = 128;
    OK(tandem_engine_create, &engine, &small);
    OK(tandem_model_create, &model, layers.data(), static_cast<int32_t>(layers.size()));
  }
  ~Machine() {
    tandem_model_release(model);
    tandem_engine_release(engine);
  }
  Machine(const Machine&) = delete;
};

// Returns options with short pages, so that keys are spread over many pages. See also Keeper::scatter().
inline tandem_cache_options short_pages(int32_t k_type = TANDEM_F32, int32_t v_type = 0) {
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  options.page_tokens = 16;
  options.k_type = k_type;
  options.v_type = v_type;
  return options;
}

// Tensors of a call. The queries are large enough for softmax to prefer some keys.
struct Batch {
  std::vector<int64_t> sequences, q_lens;
  int64_t n = 0;
  Tensor q, k, v, o, lse;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;

  Batch(const Machine& machine, int32_t layer_idx, const std::vector<std::pair<int64_t, int64_t>>& parts, int64_t seed) {
    for (const auto& [sequence, q_len] : parts) {
      sequences.push_back(sequence);
      q_lens.push_back(q_len);
      n += q_len;
    }
    const tandem_layer_options& layer = machine.layers[static_cast<size_t>(layer_idx)];
    const int64_t k_dim = layer.k_head_dim, v_dim = layer.v_head_dim != 0 ? layer.v_head_dim : k_dim;
    q = Tensor({n, layer.n_q_heads, k_dim}, seed);
    for (float& x : q.values) x *= 8.0f;
    k = Tensor({n, layer.n_kv_heads, k_dim}, seed + 1);
    v = Tensor({n, layer.n_kv_heads, v_dim}, seed + 2);
    o = Tensor({n, layer.n_q_heads, v_dim}, seed + 3);
    lse = Tensor({n, layer.n_q_heads}, seed + 4);
    args.layer_idx = layer_idx;
    args.n_sequences = static_cast<int32_t>(sequences.size());
    args.sequences = sequences.data();
    args.q_lens = q_lens.data();
    args.q = &q.view;
    args.k = &k.view;
    args.v = layer.v_aliases_k != 0 ? nullptr : &v.view;
    args.o = &o.view;
    args.lse = &lse.view;
  }
  Batch(const Batch&) = delete;
  void ask_again() { args.k = args.v = nullptr; }  // queries tokens that are already in the cache

  // Returns all outputs, or those of one layer or one token.
  std::vector<float> answers() const {
    std::vector<float> all = o.values;
    all.insert(all.end(), lse.values.begin(), lse.values.end());
    return all;
  }
};

// A cache with a session and sequences.
struct Keeper {
  const Machine& machine;
  tandem_cache* cache = nullptr;
  tandem_session *session = nullptr, *dense = nullptr;  // dense: policy "all" on the same cache, only if requested
  std::vector<int64_t> ids;

  Keeper(const Machine& of, const tandem_session_options& options, const tandem_cache_options& cache_options,
         int n_sequences = 1)
      : machine(of) {
    OK(tandem_cache_create, &cache, machine.engine, machine.model, &cache_options);
    OK(tandem_session_create, &session, cache, &options);
    for (int i = 0; i < n_sequences; ++i) OK(tandem_sequence_create, &ids.emplace_back(), cache);
  }
  ~Keeper() {
    tandem_session_release(dense);
    tandem_session_release(session);
    tandem_cache_release(cache);
  }
  Keeper(const Keeper&) = delete;

  tandem_session* beside() {
    const tandem_session_options options = dense_options();
    if (dense == nullptr) OK(tandem_session_create, &dense, cache, &options);
    return dense;
  }
  // Calls every layer with q_lens [n_sequences] tokens each, 0 for none. Returns all answers.
  std::vector<float> turn(const std::vector<int64_t>& q_lens, int64_t seed, bool appends = true) const {
    std::vector<float> all;
    std::vector<std::pair<int64_t, int64_t>> parts;
    for (size_t i = 0; i < q_lens.size(); ++i)
      if (q_lens[i] > 0) parts.emplace_back(ids[i], q_lens[i]);
    for (int32_t l = 0; l < static_cast<int32_t>(machine.layers.size()); ++l) {
      Batch batch(machine, l, parts, seed + 100 * l);
      if (!appends) batch.ask_again();
      OK(tandem_attend, session, &batch.args);
      const std::vector<float> answers = batch.answers();
      all.insert(all.end(), answers.begin(), answers.end());
    }
    return all;
  }
  // Appends tokens without attending them.
  void append(int64_t id, int64_t n, int64_t seed) const {
    for (int32_t l = 0; l < static_cast<int32_t>(machine.layers.size()); ++l) {
      const Batch batch(machine, l, {{id, n}}, seed + 100 * l);
      OK(tandem_sequence_append, cache, id, l, &batch.k.view, batch.args.v, nullptr);
    }
  }
  // Leaves holes of one page each in the store, because adjacent pages are read as one run. The holes hold NaN.
  void scatter() const {
    std::vector<int64_t> fillers(100);
    for (int64_t& filler : fillers) {
      OK(tandem_sequence_create, &filler, cache);
      for (int32_t l = 0; l < static_cast<int32_t>(machine.layers.size()); ++l) {
        Batch batch(machine, l, {{filler, 1}}, 0);
        for (Tensor* of : {&batch.k, &batch.v}) std::fill(of->values.begin(), of->values.end(), NAN);
        OK(tandem_sequence_append, cache, filler, l, &batch.k.view, batch.args.v, nullptr);
      }
    }
    for (size_t i = 0; i < fillers.size(); i += 2) OK(tandem_sequence_drop, cache, fillers[i]);
  }
  int64_t length(int64_t id, int32_t layer_idx = 0) const {
    int64_t n = -1;
    OK(tandem_sequence_length, &n, cache, id, layer_idx);
    return n;
  }
  uint64_t digest(int64_t id) const {
    uint64_t digest = 0;
    OK(tandem_sequence_digest, &digest, cache, id);
    return digest;
  }
  tandem_session_stats stats() const {
    tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
    OK(tandem_session_get_stats, &stats, session);
    stats.attend_ns = 0;
    return stats;
  }
  // Returns the tokens that the last query block attended.
  std::vector<int64_t> listed(int64_t id, int32_t kv_head = 0, int32_t layer_idx = 0) const {
    std::vector<int64_t> tokens(1 << 14);
    int64_t n = 0;
    OK(tandem_session_selection, tokens.data(), nullptr, std::ssize(tokens), &n, session, id, layer_idx, kv_head, 0);
    tokens.resize(static_cast<size_t>(n));
    return tokens;
  }
  // Attends the last token's query over named keys: one row for all KV heads, or [n_kv_heads] rows. Returns the outputs and
  // writes the lse of each query head.
  std::vector<float> over(const Batch& of, const std::vector<std::vector<int64_t>>& rows, std::vector<float>* lse) {
    size_t longest = 1;
    for (const auto& row : rows) longest = std::max(longest, row.size());
    std::vector<int32_t> idx(rows.size() * longest, -1);
    for (size_t i = 0; i < rows.size(); ++i)
      std::transform(rows[i].begin(), rows[i].end(), idx.begin() + static_cast<std::ptrdiff_t>(i * longest),
                     [](int64_t token) { return static_cast<int32_t>(token); });
    const int64_t shape[] = {1, std::ssize(rows), static_cast<int64_t>(longest)};
    tandem_tensor view;
    OK(tandem_tensor_init, &view, TANDEM_I32, idx.data(), 3, shape);
    tandem_selection selection = TANDEM_SELECTION_INIT;
    selection.idx = &view;
    Batch alone(machine, of.args.layer_idx, {{of.sequences.back(), 1}}, 0);
    std::copy(of.q.values.end() - std::ssize(alone.q.values), of.q.values.end(), alone.q.values.begin());
    alone.ask_again();
    alone.args.selection = rows.empty() ? nullptr : &selection;
    OK(tandem_attend, beside(), &alone.args);
    if (lse != nullptr) *lse = alone.lse.values;
    return alone.o.values;
  }
};

inline bool are_close(float got, float wanted, float bound = 2e-5f) {
  return std::fabs(got - wanted) <= bound * (1.0f + std::fabs(wanted)) || got == wanted;
}
inline void assert_close_to(const std::vector<float>& got, const std::vector<float>& wanted, const std::string& context) {
  assert_int_equal(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i)
    if (!are_close(got[i], wanted[i]))
      fail_msg("%s: number %zu is %.9g, not %.9g", context.c_str(), i, static_cast<double>(got[i]),
               static_cast<double>(wanted[i]));
}
// Asserts equality bit for bit, NaN included.
inline void assert_same_bits(const std::vector<float>& got, const std::vector<float>& wanted, const std::string& context) {
  assert_int_equal(got.size(), wanted.size());
  if (std::memcmp(got.data(), wanted.data(), got.size() * sizeof(float)) == 0) return;
  for (size_t i = 0; i < got.size(); ++i)
    if (std::memcmp(&got[i], &wanted[i], sizeof(float)) != 0)
      fail_msg("%s: number %zu is %.9g, not %.9g", context.c_str(), i, static_cast<double>(got[i]),
               static_cast<double>(wanted[i]));
}

}  // namespace tandem_test
