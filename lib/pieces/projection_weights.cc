// SPDX-License-Identifier: MIT
#include "lib/pieces/projection_weights.h"

#include <tuple>

namespace tandem {

Status ProjectionWeights::set(size_t layer_idx, const ProjectionBlocks& blocks, const Engine& engine) {
  const Layer& layer = layers_[layer_idx];
  const Projection* const projection = layer.projection;
  const auto l = static_cast<int32_t>(layer_idx);
  if (projection == nullptr || projection->w_k != nullptr)
    return fail(TANDEM_ERROR_UNSUPPORTED, "layer_idx", "layer_idx = %d: the layer has %s", l,
                projection == nullptr ? "no projection" : "a projection with weights of its own");
  if (blocks.weights->engine() != &engine)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "weights", "weights: they are of another engine than the session");
  const int64_t row_bytes = int64_t{layer.n_kv_heads} * projection->hidden_dim * 2;
  const std::tuple<const char*, int32_t, int64_t> wanted[] = {{"w_k_block", blocks.w_k, row_bytes * layer.k_head_dim},
                                                              {"w_v_block", blocks.w_v, row_bytes * layer.v_head_dim}};
  for (const auto& [name, block, bytes] : wanted) {
    if (block < 0 || block >= blocks.weights->n_blocks())
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, name, "%s = %d is not in [0, %d]", name, block,
                  blocks.weights->n_blocks() - 1);
    if (blocks.weights->bytes_of(block) != bytes)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, name, "%s = %d has %lld bytes, layer %d's projection takes %lld", name,
                  block, static_cast<long long>(blocks.weights->bytes_of(block)), l, static_cast<long long>(bytes));
  }
  blocks_.resize(layers_.size());
  blocks_[layer_idx] = blocks;
  return {};
}

Status ProjectionWeights::check(size_t layer_idx) const {
  if (layers_[layer_idx].projection->w_k != nullptr) return {};
  if (layer_idx < blocks_.size() && blocks_[layer_idx].weights != nullptr) return {};
  return fail(
      TANDEM_ERROR_INVALID_STATE, "layer_idx",
      "layer_idx = %zu: its projection has no w_k and w_v, and tandem_session_use_weights() has not said where they are",
      layer_idx);
}

Status ProjectionWeights::use(size_t layer_idx, WeightsInUse* weights, DeviceProjection* projection) const {
  if (layers_[layer_idx].projection->w_k != nullptr) return {};
  const ProjectionBlocks& blocks = blocks_[layer_idx];
  TANDEM_TRY(weights->use(blocks.weights, blocks.w_k, &projection->w_k));
  return weights->use(blocks.weights, blocks.w_v, &projection->w_v);
}

}  // namespace tandem
