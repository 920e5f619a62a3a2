// SPDX-License-Identifier: MIT
// Projections from hidden states to keys and values (lib/model/projection.h), in device memory.
#pragma once

#include <map>
#include <vector>

#include "lib/base/memory.h"
#include "lib/machine/device_owner.h"

namespace tandem {

// The projections of one cache in device memory. A layer's projection is uploaded when it is first requested.
class ProjectionsOnDevice {
 public:
  static int64_t bytes_of(const std::vector<Layer>& layers);  // of all layers
  Status get(const Device& device, Tier& tier, const Layer& layer, const DeviceProjection** projection);

 private:
  struct Uploaded {
    Buffer memory;
    DeviceProjection projection;
  };
  Status upload(const Device& device, Tier& tier, const Layer& layer, Uploaded* to);

  std::map<const Projection*, Uploaded> uploaded_;
  std::map<const RopeTable*, Buffer> angles_;
};

}  // namespace tandem
