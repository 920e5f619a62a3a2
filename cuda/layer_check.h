// SPDX-License-Identifier: MIT
// Refuses layers that the module cannot serve in any call. No other file states these limits.
#pragma once

#include "cuda/driver.h"
#include "lib/model/dtype.h"
#include "lib/model/hadamard.h"

namespace tandem::cuda {

inline constexpr int32_t kMostDims = 256;    // of a row: a warp holds one row, 8 numbers a lane
inline constexpr int32_t kLeastRotated = 4;  // dims of a rotated row: the numbers that a lane holds side by side

// True if append() can round rows to this type (kernels/round.cuh).
constexpr bool rounds_to(int32_t dtype) {
  switch (dtype) {
    case TANDEM_F32:
    case TANDEM_F16:
    case TANDEM_BF16:
    case TANDEM_E4M3:
    case TANDEM_Q8_0:
    case TANDEM_Q4_0:
      return true;
    default:
      return false;
  }
}

inline int32_t check_dims(int32_t dims, const char* field, DeviceError* error) {
  if (dims > 0 && dims % 4 == 0 && dims <= kMostDims) return TANDEM_OK;
  return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, field, "%s = %d: this module has multiples of 4 up to %d", field, dims,
              kMostDims);
}

// Returns UNSUPPORTED and the reason if the module cannot serve the layer.
inline int32_t check_layer(const Layer& layer, DeviceError* error) {
  if (layer.v_aliases_k)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "v_aliases_k", "v_aliases_k = 1: this module has no kernel for MLA");
  if (layer.k_rotation == TANDEM_ROTATION_HADAMARD && (!hadamard_has(layer.k_head_dim) || layer.k_head_dim < kLeastRotated))
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "k_rotation",
                "k_rotation = %d with k_head_dim = %d: this module rotates rows of powers of two from %d on",
                layer.k_rotation, layer.k_head_dim, kLeastRotated);
  if (!rounds_to(layer.k_type))
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "k_type", "k_type = %s: this module does not round to it",
                find_dtype(layer.k_type)->name);
  if (!rounds_to(layer.v_type))
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "v_type", "v_type = %s: this module does not round to it",
                find_dtype(layer.v_type)->name);
  if (const int32_t code = check_dims(layer.k_head_dim, "k_head_dim", error); code != TANDEM_OK) return code;
  return check_dims(layer.v_head_dim, "v_head_dim", error);
}

}  // namespace tandem::cuda
