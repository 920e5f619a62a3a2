// SPDX-License-Identifier: MIT
// From a kernel's shape to its line in the table.
#pragma once

#include "cuda/prefill_call.h"

namespace tandem::cuda {

template <class Shape>
__global__ void prefill_kernel(const __grid_constant__ PrefillCall call);

template <class Shape>
PrefillKernel make_prefill_kernel() {
  return {Shape::K::kDtype,
          Shape::V::kDtype,
          Shape::kKDim,
          Shape::kVDim,
          Shape::kRows,
          Shape::kTileKeys,
          Shape::kThreads,
          Shape::kBlocks,
          Shape::kSharedBytes,
          Shape::kStateFloats,
          0,
          Shape::kQParts,
          Shape::K::KeyNumber::kNarrow,
          reinterpret_cast<const void*>(prefill_kernel<Shape>)};
}

}  // namespace tandem::cuda
