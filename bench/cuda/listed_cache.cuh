// SPDX-License-Identifier: MIT
// Shared by the benches of named keys: a layer of a model with its own indexer, 64 query heads and 4 KV heads of 128 dims in
// bf16, and a sequence of random keys in host memory.
#pragma once

#include "cuda/hybrid_case.h"

namespace tandem::test {

inline constexpr int32_t kQueryHeads = 64, kListHeads = 4;

struct ListedCache {
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  int64_t sequence = 0;

  // The sequence has n_keys tokens in each layer, and room for n_more.
  ListedCache(tandem_engine* engine, int32_t n_layers, int64_t n_keys, int64_t n_more) {
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    layer.n_q_heads = kQueryHeads;
    layer.n_kv_heads = kListHeads;
    layer.k_head_dim = kDim;
    const std::vector<tandem_layer_options> shapes(static_cast<size_t>(n_layers), layer);
    TANDEM(tandem_model_create, &model, shapes.data(), n_layers);
    TANDEM(tandem_cache_create, &cache, engine, model, nullptr);
    TANDEM(tandem_sequence_create, &sequence, cache);
    TANDEM(tandem_sequence_reserve, cache, sequence, n_keys + n_more);
    constexpr int64_t kPiece = 8192;
    std::vector<__nv_bfloat16> k = random_rows(kPiece * kListHeads * kDim, 4),
                               v = random_rows(kPiece * kListHeads * kDim, 5);
    for (int32_t l = 0; l < n_layers; ++l)
      for (int64_t t = 0; t < n_keys; t += kPiece) {
        const int64_t n = std::min(kPiece, n_keys - t);
        const tandem_tensor k_view = tensor_of(k.data(), n, kListHeads, false),
                            v_view = tensor_of(v.data(), n, kListHeads, false);
        TANDEM(tandem_sequence_append, cache, sequence, l, &k_view, &v_view, nullptr);
      }
  }
  ListedCache(const ListedCache&) = delete;
  ~ListedCache() {
    tandem_cache_release(cache);
    tandem_model_release(model);
  }
};

}  // namespace tandem::test
