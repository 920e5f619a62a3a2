// SPDX-License-Identifier: MIT
#pragma once

#include "lib/tables/device.h"

namespace tandem::cuda {

// The place and the layout of rows of K in the window.
struct WindowKeys {
  const std::byte *codes, *scales;                // of KV head 0 and slot 0, in the page that tables call 0
  int64_t codes_head_stride, scales_head_stride;  // bytes
  int32_t row_bytes, scale_bytes;
  int32_t page_len;
  int32_t type, dim;
};

// Describes the keys of a window. layer is as the window has it (window_layer()).
inline WindowKeys keys_of(const DevicePages& pages, const Layer& layer) {
  const PlaneBytes bytes = plane_bytes(layer);
  WindowKeys keys = {};
  keys.codes = pages.planes[kPlaneK];
  keys.scales = pages.planes[kPlaneKScales];
  keys.codes_head_stride = pages.head_stride[kPlaneK];
  keys.scales_head_stride = pages.head_stride[kPlaneKScales];
  keys.row_bytes = static_cast<int32_t>(bytes.of[kPlaneK]);
  keys.scale_bytes = static_cast<int32_t>(bytes.of[kPlaneKScales]);
  keys.page_len = pages.page_len;
  keys.type = layer.k_type;
  keys.dim = layer.k_head_dim;
  return keys;
}

}  // namespace tandem::cuda
