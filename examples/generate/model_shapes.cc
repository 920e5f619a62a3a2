// SPDX-License-Identifier: MIT
#include "model_shapes.h"

#include "flags.h"

namespace generate {
namespace {

struct Shapes {
  const char* name;
  int64_t n_layers, hidden_size, n_q_heads, n_kv_heads, head_dim, ffn_size, vocab_size;
  double rope_theta;
  bool tied_embeddings;
};
constexpr Shapes kShapes[] = {
    {"llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 500000, false},
    {"llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, 500000, true},
};

}  // namespace

std::vector<std::string> model_shape_names() {
  std::vector<std::string> names;
  for (const Shapes& shapes : kShapes) names.emplace_back(shapes.name);
  return names;
}

Failure find_model_shapes(ModelConfig* config, const std::string& name) {
  for (const Shapes& shapes : kShapes) {
    if (name != shapes.name) continue;
    config->model_type = "llama";
    config->n_layers = shapes.n_layers;
    config->hidden_size = shapes.hidden_size;
    config->n_q_heads = shapes.n_q_heads;
    config->n_kv_heads = shapes.n_kv_heads;
    config->head_dim = shapes.head_dim;
    config->ffn_size = shapes.ffn_size;
    config->vocab_size = shapes.vocab_size;
    config->rms_eps = 1e-5;
    config->rope_theta = shapes.rope_theta;
    config->tied_embeddings = shapes.tied_embeddings;
    return {};
  }
  return none_of("--shapes", name, model_shape_names());
}

}  // namespace generate
