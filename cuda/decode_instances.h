// SPDX-License-Identifier: MIT
// From a kernel's shape to its line in the table.
#pragma once

#include "cuda/decode_call.h"

namespace tandem::cuda {

template <class Shape>
__global__ void decode_kernel(const __grid_constant__ DecodeCall call);

template <class Shape>
DecodeKernel make_decode_kernel() {
  return {Shape::K::kDtype,
          Shape::V::kDtype,
          Shape::kKDim,
          Shape::kVDim,
          Shape::kRows,
          Shape::kThreads,
          Shape::kSharedBytes,
          Shape::kStateFloats,
          Shape::K::KeyNumber::kNarrow,
          reinterpret_cast<const void*>(decode_kernel<Shape>)};
}

}  // namespace tandem::cuda
