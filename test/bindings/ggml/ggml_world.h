// SPDX-License-Identifier: MIT
// Shared by the tests of the ggml binding: a graph in memory of its own, which holds NaN until it is written, and Tandem's
// objects with a state of the binding over them.
#pragma once

#include <ggml-cpu.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "api/api_world.h"
#include "tandem-ggml.h"
#include "tandem/tandem.hpp"
#include "with_cmocka.h"

namespace ggml_test {

using tandem_test::noise;

class Graph {
 public:
  explicit Graph(size_t bytes = size_t{8} << 20) : memory_(bytes, 0xff) {
    ctx_ = ggml_init({bytes, memory_.data(), false});
    graph_ = ggml_new_graph(ctx_);
  }
  ~Graph() { ggml_free(ctx_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  ggml_context* ctx() const { return ctx_; }
  // Returns a tensor [head_dim, n_heads, n_tokens] of noise, rounded as ggml rounds.
  ggml_tensor* heads(ggml_type type, int64_t head_dim, int64_t n_heads, int64_t n_tokens, int64_t seed) const {
    ggml_tensor* tensor = ggml_new_tensor_3d(ctx_, type, head_dim, n_heads, n_tokens);
    std::vector<float> values(static_cast<size_t>(ggml_nelements(tensor)));
    for (size_t i = 0; i < values.size(); ++i) values[i] = 2.0f * noise(static_cast<int64_t>(i), seed);
    round_into(tensor, values.data());
    return tensor;
  }
  static void round_into(ggml_tensor* tensor, const float* values) {
    const int64_t n_rows = ggml_nrows(tensor), n = tensor->ne[0];
    if (ggml_is_quantized(tensor->type))
      ggml_quantize_chunk(tensor->type, values, tensor->data, 0, n_rows, n, nullptr);
    else if (tensor->type == GGML_TYPE_F16)
      ggml_fp32_to_fp16_row(values, static_cast<ggml_fp16_t*>(tensor->data), n_rows * n);
    else if (tensor->type == GGML_TYPE_BF16)
      ggml_fp32_to_bf16_row(values, static_cast<ggml_bf16_t*>(tensor->data), n_rows * n);
    else
      std::memcpy(tensor->data, values, static_cast<size_t>(n_rows * n) * sizeof(float));
  }
  void add(ggml_tensor* node) const { ggml_build_forward_expand(graph_, node); }
  // Computes the node and all nodes added before.
  void compute(ggml_tensor* node, int n_threads = 1) const {
    add(node);
    assert_int_equal(ggml_graph_compute_with_ctx(ctx_, graph_, n_threads), GGML_STATUS_SUCCESS);
  }

 private:
  std::vector<uint8_t> memory_;
  ggml_context* ctx_;
  ggml_cgraph* graph_;
};

// Returns the numbers of a contiguous tensor as f32.
inline std::vector<float> values_of(const ggml_tensor* tensor) {
  std::vector<float> values(static_cast<size_t>(ggml_nelements(tensor)));
  assert_true(ggml_is_contiguous(tensor));
  if (tensor->type == GGML_TYPE_F32)
    std::memcpy(values.data(), tensor->data, values.size() * sizeof(float));
  else
    ggml_get_type_traits(tensor->type)->to_float(tensor->data, values.data(), ggml_nelements(tensor));
  return values;
}

inline bool all_nan(const ggml_tensor* tensor) {
  for (const float x : values_of(tensor))
    if (!std::isnan(x)) return false;
  return true;
}

struct FreeState {
  void operator()(tandem_ggml* state) const { tandem_ggml_release(state); }
};
using State = std::unique_ptr<tandem_ggml, FreeState>;

inline tandem_engine_options two_threads() {
  tandem_engine_options options = tandem_test::small_engine_options();
  options.matmul_rows = 24;
  return options;
}

inline tandem_layer_options plain_layer(int32_t n_q_heads = 4, int32_t n_kv_heads = 2, int32_t head_dim = 64) {
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = n_q_heads;
  layer.n_kv_heads = n_kv_heads;
  layer.k_head_dim = head_dim;
  return layer;
}

inline tandem_cache_options stored_as(int32_t type) {
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  options.k_type = type;
  return options;
}

// Four head patterns for plain_layer(): sinks and a window, columns and diagonals, blocks, all keys.
struct FourPatterns {
  tandem_head_pattern heads[4] = {TANDEM_HEAD_PATTERN_INIT, TANDEM_HEAD_PATTERN_INIT, TANDEM_HEAD_PATTERN_INIT,
                                  TANDEM_HEAD_PATTERN_INIT};
  tandem_patterns patterns = TANDEM_PATTERNS_INIT;
  tandem_session_options session = TANDEM_SESSION_OPTIONS_INIT;

  FourPatterns() {
    heads[0].kinds = TANDEM_PATTERN_A_SHAPE;
    heads[0].sink_tokens = 8;
    heads[0].window_tokens = 32;
    heads[1].kinds = TANDEM_PATTERN_VERTICAL_SLASH;
    heads[1].vertical_tokens = 8;
    heads[1].slash_tokens = 32;
    heads[2].kinds = TANDEM_PATTERN_BLOCK_SPARSE;
    heads[2].n_blocks = 1;
    patterns.heads = heads;
    patterns.n_heads = 4;
    session.policy = "patterns";
    session.patterns = &patterns;
    session.window_tokens = 512;
  }
  FourPatterns(const FourPatterns&) = delete;
  FourPatterns& operator=(const FourPatterns&) = delete;
};

// Two sequences, both empty.
struct World {
  std::vector<tandem_layer_options> layers;
  tandem::Engine engine;
  tandem::Model model;
  tandem::Cache cache;
  tandem::Session session;
  std::vector<int64_t> sequences;
  State state;

  explicit World(const std::vector<tandem_layer_options>& of = {plain_layer()},
                 const tandem_cache_options& cache_options = stored_as(TANDEM_F32),
                 const tandem_engine_options& engine_options = two_threads(),
                 const tandem_session_options& session_options = TANDEM_SESSION_OPTIONS_INIT)
      : layers(of),
        engine(engine_options),
        model(layers),
        cache(engine, model, cache_options),
        session(cache, session_options),
        sequences{cache.create_sequence(), cache.create_sequence()},
        state(make()) {}
  State make() const {
    tandem_ggml* made = nullptr;
    const char* why = nullptr;
    const tandem_ggml_options given = options();
    assert_int_equal(tandem_ggml_create(&made, &given, &why), TANDEM_OK);
    assert_null(why);
    return State(made);
  }
  tandem_ggml_options options() const {
    tandem_ggml_options options = {};
    options.cache = cache.get();
    options.session = session.get();
    options.layers = layers.data();
    options.n_layers = static_cast<int32_t>(layers.size());
    options.sequences = sequences.data();
    options.n_sequences = static_cast<int32_t>(sequences.size());
    return options;
  }
  int64_t length(size_t sequence, int32_t layer_idx = 0) const {
    int64_t n = -1;
    assert_int_equal(tandem_sequence_length(&n, cache.get(), sequences[sequence], layer_idx, nullptr), TANDEM_OK);
    return n;
  }
};

// The members of a llama_batch: q_lens[i] tokens of sequence ids[i], one sequence after the other.
class Batch {
 public:
  Batch(const std::vector<int32_t>& ids, const std::vector<int64_t>& q_lens, const std::vector<int64_t>& first = {}) {
    for (size_t i = 0; i < ids.size(); ++i)
      for (int64_t t = 0; t < q_lens[i]; ++t) {
        ids_.push_back(ids[i]);
        pos_.push_back(static_cast<int32_t>((first.empty() ? 0 : first[i]) + t));
        counts_.push_back(1);
      }
    for (int32_t& id : ids_) rows_.push_back(&id);
    view.n_tokens = static_cast<int32_t>(ids_.size());
    view.seq_id = rows_.data();
    view.n_seq_id = counts_.data();
    view.pos = first.empty() ? nullptr : pos_.data();
  }
  Batch(const Batch&) = delete;
  tandem_ggml_batch view = {};
  std::vector<int32_t> ids_, pos_, counts_;

 private:
  std::vector<int32_t*> rows_;
};

inline void expect_ok(tandem_ggml* state, int32_t status) {
  if (status != TANDEM_OK) fail_msg("%s: %s", tandem_status_name(status), tandem_ggml_message(state));
}

}  // namespace ggml_test
