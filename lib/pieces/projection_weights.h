// SPDX-License-Identifier: MIT
// Locations of W_K and W_V that the model does not have, as given to a session (tandem_session_use_weights).
#pragma once

#include <memory>
#include <vector>

#include "lib/model/layer.h"
#include "lib/weights/weights.h"

namespace tandem {

// A layer's blocks of offloaded weights.
struct ProjectionBlocks {
  std::shared_ptr<Weights> weights;  // null: not given yet
  int32_t w_k = 0, w_v = 0;
};

class ProjectionWeights {
 public:
  explicit ProjectionWeights(const std::vector<Layer>& layers) : layers_(layers) {}

  // UNSUPPORTED (layer_idx), INVALID_ARGUMENT (weights, w_k_block, w_v_block).
  Status set(size_t layer_idx, const ProjectionBlocks& blocks, const Engine& engine);
  // Ok if the layer's weights are known: the model has them, or set() has given their blocks. Else INVALID_STATE
  // (layer_idx).
  Status check(size_t layer_idx) const;
  // Makes the layer's blocks readable on the stream of `weights` until they are released. Does nothing if the model has W_K
  // and W_V.
  Status use(size_t layer_idx, WeightsInUse* weights, DeviceProjection* projection) const;

 private:
  const std::vector<Layer>& layers_;
  std::vector<ProjectionBlocks> blocks_;  // [n_layers] or empty
};

}  // namespace tandem
