// SPDX-License-Identifier: MIT
// A real model as a ggml graph with the node for its attention. Prefill and decode of pico give the logits that Hugging Face
// Transformers computed. The graph of a decode step is built once, because keys come and go outside it.
#include <ggml-alloc.h>

#include "examples/pico_golden.h"
#include "ggml_world.h"
#include "llama_config.h"

namespace {

using namespace ggml_test;

struct FreeBackend {
  void operator()(ggml_backend* backend) const { ggml_backend_free(backend); }
  void operator()(ggml_backend_buffer* buffer) const { ggml_backend_buffer_free(buffer); }
  void operator()(ggml_backend_sched* scheduler) const { ggml_backend_sched_free(scheduler); }
  void operator()(ggml_context* ctx) const { ggml_free(ctx); }
};
template <typename T>
using Owned = std::unique_ptr<T, FreeBackend>;

generate::ModelConfig read_config() {
  generate::ModelConfig config;
  pico::require(generate::read_model_config(&config, pico::kModel));
  return config;
}

struct Options {
  bool is_cut = false;  // the scheduler's callback attends instead of the graph
  int32_t rope = TANDEM_ROPE_CALLER;
  const char* policy = "all";
};

class Pico {
 public:
  explicit Pico(const Options& options)
      : options_(options), config_(read_config()), world_(layers(), stored_as(TANDEM_F32), two_threads(), policy()) {
    pico::require(files_.open_directory(pico::kModel));
    backend_.reset(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(backend_.get(), 1);
    weights_.reset(ggml_init({ggml_tensor_overhead() * 256, nullptr, true}));
    make_weights();
    ggml_backend_t backends[] = {backend_.get()};
    scheduler_.reset(ggml_backend_sched_new(backends, nullptr, 1, kNodes, false, true));
    if (options.is_cut) ggml_backend_sched_set_eval_callback(scheduler_.get(), tandem_ggml_eval, nullptr);
  }
  // Returns the logits [n_tokens, 256] of tokens that follow the earlier ones.
  std::vector<float> forward(const std::string& tokens) {
    const auto n = static_cast<int64_t>(tokens.size());
    if (n != graph_tokens_) make_graph(n);
    const int64_t first = world_.length(0);
    const Batch batch({0}, {n}, {first});
    std::vector<int32_t> ids;
    for (const char byte : tokens) ids.push_back(static_cast<uint8_t>(byte));
    ggml_backend_tensor_set(tokens_, ids.data(), 0, ids.size() * sizeof(int32_t));
    if (positions_->buffer != nullptr)  // otherwise the library rotates
      ggml_backend_tensor_set(positions_, batch.pos_.data(), 0, batch.pos_.size() * sizeof(int32_t));
    tandem_ggml* state = world_.state.get();
    expect_ok(state, tandem_ggml_begin(state, &batch.view));
    assert_int_equal(ggml_backend_sched_graph_compute(scheduler_.get(), graph_), GGML_STATUS_SUCCESS);
    expect_ok(state, tandem_ggml_end(state));
    std::vector<float> logits(static_cast<size_t>(ggml_nelements(logits_)));
    ggml_backend_tensor_get(logits_, logits.data(), 0, logits.size() * sizeof(float));
    return logits;
  }
  const World& world() const { return world_; }
  int64_t n_layers() const { return config_.n_layers; }

 private:
  static constexpr size_t kNodes = 2048;

  std::vector<tandem_layer_options> layers() const {
    tandem_layer_options layer =
        plain_layer(static_cast<int32_t>(config_.n_q_heads), static_cast<int32_t>(config_.n_kv_heads),
                    static_cast<int32_t>(config_.head_dim));
    layer.rope = options_.rope;
    layer.rope_theta = config_.rope_theta;
    return std::vector<tandem_layer_options>(static_cast<size_t>(config_.n_layers), layer);
  }
  tandem_session_options policy() const {
    tandem_session_options session = TANDEM_SESSION_OPTIONS_INIT;
    session.policy = options_.policy;
    return session;
  }

  void make_weights() {
    const int64_t hidden = config_.hidden_size, ffn = config_.ffn_size;
    const auto add = [&](const std::string& name, int64_t n_in, int64_t n_out) {
      ggml_tensor* tensor = ggml_new_tensor_2d(weights_.get(), GGML_TYPE_F32, n_in, n_out);
      ggml_set_name(tensor, name.c_str());
    };
    add("embed_tokens", hidden, config_.vocab_size);
    add("norm", hidden, 1);
    for (int64_t i = 0; i < config_.n_layers; ++i) {
      const std::string at = "layers." + std::to_string(i) + ".";
      add(at + "input_layernorm", hidden, 1);
      add(at + "post_attention_layernorm", hidden, 1);
      add(at + "self_attn.q_proj", hidden, config_.q_size());
      add(at + "self_attn.k_proj", hidden, config_.kv_size());
      add(at + "self_attn.v_proj", hidden, config_.kv_size());
      add(at + "self_attn.o_proj", config_.q_size(), hidden);
      add(at + "mlp.gate_proj", hidden, ffn);
      add(at + "mlp.up_proj", hidden, ffn);
      add(at + "mlp.down_proj", ffn, hidden);
    }
    weight_data_.reset(ggml_backend_alloc_ctx_tensors(weights_.get(), backend_.get()));
    for (ggml_tensor* t = ggml_get_first_tensor(weights_.get()); t != nullptr; t = ggml_get_next_tensor(weights_.get(), t)) {
      std::vector<float> values;
      const std::vector<int64_t> shape =
          t->ne[1] == 1 ? std::vector<int64_t>{t->ne[0]} : std::vector<int64_t>{t->ne[1], t->ne[0]};
      pico::require(files_.read_f32("model." + std::string(t->name) + ".weight", shape, &values));
      ggml_backend_tensor_set(t, values.data(), 0, values.size() * sizeof(float));
    }
  }
  ggml_tensor* weight(const std::string& name) const {
    ggml_tensor* tensor = ggml_get_tensor(weights_.get(), name.c_str());
    assert_non_null(tensor);
    return tensor;
  }
  ggml_tensor* normed(ggml_tensor* x, const std::string& name) const {
    ggml_context* c = graph_ctx_.get();
    return ggml_mul(c, ggml_rms_norm(c, x, static_cast<float>(config_.rms_eps)), weight(name));
  }
  // Returns [head_dim, n_heads, n_tokens], rotated if the caller rotates.
  ggml_tensor* heads(ggml_tensor* x, const std::string& name, int64_t n_heads, bool is_rotated) const {
    ggml_context* c = graph_ctx_.get();
    ggml_tensor* made = ggml_reshape_3d(c, ggml_mul_mat(c, weight(name), x), config_.head_dim, n_heads, x->ne[1]);
    if (!is_rotated || options_.rope != TANDEM_ROPE_CALLER) return made;
    return ggml_rope_ext(c, made, positions_, nullptr, static_cast<int>(config_.head_dim), GGML_ROPE_TYPE_NEOX, 0,
                         static_cast<float>(config_.rope_theta), 1.0f, 0.0f, 1.0f, 0.0f, 0.0f);
  }
  ggml_tensor* layer(ggml_tensor* x, int32_t i) {
    ggml_context* c = graph_ctx_.get();
    const std::string at = "layers." + std::to_string(i) + ".";
    ggml_tensor* h = normed(x, at + "input_layernorm");
    ggml_tensor* q = heads(h, at + "self_attn.q_proj", config_.n_q_heads, true);
    ggml_tensor* k = heads(h, at + "self_attn.k_proj", config_.n_kv_heads, true);
    ggml_tensor* v = heads(h, at + "self_attn.v_proj", config_.n_kv_heads, false);
    ggml_tensor* o = options_.is_cut ? tandem_ggml_attend_cut(c, world_.state.get(), i, q, k, v)
                                     : tandem_ggml_attend(c, world_.state.get(), i, q, k, v);
    o = ggml_reshape_2d(c, o, config_.q_size(), x->ne[1]);
    x = ggml_add(c, x, ggml_mul_mat(c, weight(at + "self_attn.o_proj"), o));
    h = normed(x, at + "post_attention_layernorm");
    ggml_tensor* gate = ggml_silu(c, ggml_mul_mat(c, weight(at + "mlp.gate_proj"), h));
    ggml_tensor* up = ggml_mul_mat(c, weight(at + "mlp.up_proj"), h);
    return ggml_add(c, x, ggml_mul_mat(c, weight(at + "mlp.down_proj"), ggml_mul(c, gate, up)));
  }
  void make_graph(int64_t n_tokens) {
    graph_ctx_.reset(
        ggml_init({ggml_tensor_overhead() * kNodes + ggml_graph_overhead_custom(kNodes, false), nullptr, true}));
    ggml_context* c = graph_ctx_.get();
    graph_ = ggml_new_graph_custom(c, kNodes, false);
    tokens_ = ggml_new_tensor_1d(c, GGML_TYPE_I32, n_tokens);
    positions_ = ggml_new_tensor_1d(c, GGML_TYPE_I32, n_tokens);
    ggml_set_input(tokens_);
    ggml_set_input(positions_);
    ggml_tensor* x = ggml_get_rows(c, weight("embed_tokens"), tokens_);
    for (int32_t i = 0; i < config_.n_layers; ++i) x = layer(x, i);
    logits_ = ggml_mul_mat(c, weight("embed_tokens"), normed(x, "norm"));
    ggml_set_output(logits_);
    ggml_build_forward_expand(graph_, logits_);
    ggml_backend_sched_reset(scheduler_.get());
    assert_true(ggml_backend_sched_alloc_graph(scheduler_.get(), graph_));
    graph_tokens_ = n_tokens;
  }

  Options options_;
  generate::ModelConfig config_;
  World world_;
  generate::WeightFiles files_;
  Owned<ggml_backend> backend_;
  Owned<ggml_context> weights_;
  Owned<ggml_backend_buffer> weight_data_;
  Owned<ggml_backend_sched> scheduler_;
  Owned<ggml_context> graph_ctx_;
  ggml_cgraph* graph_ = nullptr;
  ggml_tensor *tokens_ = nullptr, *positions_ = nullptr, *logits_ = nullptr;
  int64_t graph_tokens_ = 0;
};

// Attends a prompt of 992 tokens, 16 more as one append, then 16 one at a time.
void check(const Options& options) {
  const pico::Golden golden;
  Pico model(options);
  model.forward(golden.prompt.substr(0, 992));
  std::vector<float> logits = model.forward(golden.prompt.substr(992, 16));
  for (size_t at = 1008; at < 1024; ++at) {
    const std::vector<float> step = model.forward(golden.prompt.substr(at, 1));
    logits.insert(logits.end(), step.begin(), step.end());
  }
  assert_int_equal(logits.size(), 32 * 256);
  const double most = pico::max_difference(logits.data(), golden.logits.data(), 32 * 256);
  print_message("rope %d, policy %s%s: logits differ by at most %.2e\n", options.rope, options.policy,
                options.is_cut ? ", by the callback" : "", most);
  assert_true(most <= pico::kMostDifference);
  for (int32_t i = 0; i < model.n_layers(); ++i) assert_int_equal(model.world().length(0, i), 1024);
}

void nodes_give_golden_logits(void**) {
  check({});
  check({false, TANDEM_ROPE_HALVES, "all"});
  check({false, TANDEM_ROPE_CALLER, "hgca"});
}

void the_callback_gives_golden_logits(void**) { check({true, TANDEM_ROPE_CALLER, "all"}); }

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(nodes_give_golden_logits),
                              cmocka_unit_test(the_callback_gives_golden_logits)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
