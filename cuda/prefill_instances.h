// SPDX-License-Identifier: MIT
// From a kernel's shape to its line in the table.
#pragma once

#include "cuda/prefill_call.h"

namespace tandem::cuda {

// Of kernels that take every call.
template <class Shape>
PrefillKernel describe_prefill_kernel(bool is_sm90, const void* function) {
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
          Shape::kQParts,
          Shape::K::KeyNumber::kNarrow,
          is_sm90,
          false,
          function};
}

template <class Shape>
__global__ void prefill_kernel(const __grid_constant__ PrefillCall call);

template <class Shape>
PrefillKernel make_prefill_kernel() {
  return describe_prefill_kernel<Shape>(false, reinterpret_cast<const void*>(prefill_kernel<Shape>));
}

template <class Shape>
__global__ void prefill_sm90_kernel(const __grid_constant__ PrefillCall call);

template <class Shape>
PrefillKernel make_prefill_sm90_kernel() {
  return {Shape::V::kDtype,
          Shape::V::kDtype,
          Shape::kVDim,
          Shape::kVDim,
          Shape::kRows,
          Shape::kTileKeys,
          Shape::kThreads,
          Shape::kBlocks,
          Shape::kSharedBytes,
          Shape::kStateFloats,
          1,
          Shape::Number::kNarrow,
          true,
          true,
          reinterpret_cast<const void*>(prefill_sm90_kernel<Shape>)};
}

template <class Shape>
__global__ void prefill_codes_kernel(const __grid_constant__ PrefillCall call);

template <class Shape>
PrefillKernel make_prefill_codes_kernel() {
  return describe_prefill_kernel<Shape>(true, reinterpret_cast<const void*>(prefill_codes_kernel<Shape>));
}

}  // namespace tandem::cuda
