// SPDX-License-Identifier: MIT
// W_K and W_V that the model has not got: where they are, as a session was told (tandem_session_use_weights).
#pragma once

#include <memory>
#include <vector>

#include "lib/model/layer.h"
#include "lib/weights/weights.h"

namespace tandem {

// Of a layer: blocks of offloaded weights.
struct ProjectionBlocks {
  std::shared_ptr<Weights> weights;  // null: nobody has said
  int32_t w_k = 0, w_v = 0;
};

class ProjectionWeights {
 public:
  explicit ProjectionWeights(const std::vector<Layer>& layers) : layers_(layers) {}

  // UNSUPPORTED (layer_idx), INVALID_ARGUMENT (weights, w_k_block, w_v_block).
  Status set(size_t layer_idx, const ProjectionBlocks& blocks, const Engine& engine);
  // The layer's are known: the model has them, or set() has said where they are. INVALID_STATE (layer_idx).
  Status check(size_t layer_idx) const;
  // To be read on weights' stream until it is done with them; where the model has them nothing is used.
  Status use(size_t layer_idx, WeightsInUse* weights, DeviceProjection* projection) const;

 private:
  const std::vector<Layer>& layers_;
  std::vector<ProjectionBlocks> blocks_;  // [n_layers] or empty
};

}  // namespace tandem
