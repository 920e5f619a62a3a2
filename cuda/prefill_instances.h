// SPDX-License-Identifier: MIT
// Makes a kernel's line in the table from its shape.
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
          Shape::kOfMultiprocessor,
          Shape::kQParts,
          Shape::K::KeyNumber::kNarrow,
          false,
          true,
          false,
          {true, true, false},
          reinterpret_cast<const void*>(prefill_kernel<Shape>),
          {}};
}

// Kernels for compute capability 9.0. They multiply queries as one summand.
template <class Shape>
PrefillKernel make_groups_kernel(bool copies_q, KeyNames names, const void* function, const BoxShape& box = {}) {
  return {Shape::K::kDtype,
          Shape::V::kDtype,
          Shape::kDim,
          Shape::kVDim,
          Shape::kRows,
          Shape::kTileKeys,
          Shape::kThreads,
          Shape::kBlocks,
          Shape::kSharedBytes,
          Shape::kStateFloats,
          0,
          1,
          Shape::Number::kNarrow,
          true,
          false,
          copies_q,
          {names == kNoNames, names == kTileNames, names == kGranuleNames},
          function,
          box};
}

template <class Shape>
struct TileMaps;
template <class Shape>
__global__ void prefill_sm90_kernel(const __grid_constant__ PrefillCall call, const __grid_constant__ TileMaps<Shape> maps);

template <class Shape>
PrefillKernel make_prefill_sm90_kernel(KeyNames names) {
  const BoxShape box = {2 * Shape::kDim, 128, 64};
  return make_groups_kernel<Shape>(true, names, reinterpret_cast<const void*>(prefill_sm90_kernel<Shape>), box);
}

template <class Shape>
__global__ void prefill_codes_kernel(const __grid_constant__ PrefillCall call);

template <class Shape>
PrefillKernel make_prefill_codes_kernel(KeyNames names) {
  return make_groups_kernel<Shape>(false, names, reinterpret_cast<const void*>(prefill_codes_kernel<Shape>));
}

}  // namespace tandem::cuda
