// SPDX-License-Identifier: MIT
// Geometry of all layers: checked, with defaults filled in. All data that outlives the call is copied.
#pragma once

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "lib/base/status.h"
#include "lib/model/layer.h"

namespace tandem {

class Model {
 public:
  // layers: complete structs. Storage types of the resulting layers are 0. A cache fills them in.
  static Status create(const std::vector<tandem_layer_options>& layers, std::shared_ptr<const Model>* model);

  const std::vector<Layer>& layers() const { return layers_; }

 private:
  const RopeTable* angles(const tandem_layer_options& options, int32_t rope);

  std::vector<Layer> layers_;
  std::vector<std::vector<float>> sinks_;  // [n_layers] -> [n_q_heads]
  std::vector<std::unique_ptr<RopeTable>> rope_tables_;
  // Keyed by interleaving, attention factor and inverse frequencies.
  std::map<std::tuple<bool, float, std::vector<double>>, const RopeTable*> tables_;
  std::vector<std::unique_ptr<OwnedProjection>> projections_;  // of the layers that have one
};

class LayerRefusal;
// Checks one layer. INVALID_ARGUMENT or UNSUPPORTED, naming the member with the refusal's prefix.
Status check_layer(const tandem_layer_options& layer, const LayerRefusal& refuse);
// Returns a checked layer with defaults filled in, except for the members that a model owns: sinks, RoPE, projection.
Layer resolve_layer(const tandem_layer_options& layer);

}  // namespace tandem
