// SPDX-License-Identifier: MIT
// Geometry of all layers, checked, with defaults filled in and everything that outlives the call copied.
#pragma once

#include <memory>
#include <vector>

#include "lib/layer.h"
#include "lib/status.h"

namespace tandem {

class Model {
 public:
  // layers: complete structs. Storage types of the layers are 0 here; a cache fills them in.
  static Status create(const std::vector<tandem_layer_options>& layers, std::shared_ptr<const Model>* model);

  const std::vector<Layer>& layers() const { return layers_; }

 private:
  std::vector<Layer> layers_;
  std::vector<std::vector<float>> sinks_;                // [n_layers] -> [n_q_heads]
  std::vector<std::unique_ptr<RopeTable>> rope_tables_;  // one for each distinct description
};

// Checks one layer alone: INVALID_ARGUMENT or UNSUPPORTED, naming layers[layer_idx].member.
Status check_layer(const tandem_layer_options& layer, int64_t layer_idx);

}  // namespace tandem
