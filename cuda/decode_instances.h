// SPDX-License-Identifier: MIT
// Makes a kernel's line in the table from its shape.
#pragma once

#include "cuda/decode_call.h"

namespace tandem::cuda {

template <class Shape>
DecodeKernel describe_decode_kernel(int32_t of_multiprocessor, const void* function, const BoxShape& k_box,
                                    const BoxShape& v_box) {
  return {Shape::K::kDtype,
          Shape::V::kDtype,
          Shape::kKDim,
          Shape::kVDim,
          Shape::kRows,
          Shape::kThreads,
          Shape::kSharedBytes,
          Shape::kStateFloats,
          of_multiprocessor,
          Shape::K::KeyNumber::kNarrow,
          Shape::kHasLists,
          function,
          k_box,
          v_box};
}

template <class Shape>
__global__ void decode_kernel(const __grid_constant__ DecodeCall call);

template <class Shape>
DecodeKernel make_decode_kernel() {
  return describe_decode_kernel<Shape>(Shape::kOfMultiprocessor, reinterpret_cast<const void*>(decode_kernel<Shape>), {},
                                       {});
}

template <class Shape>
__global__ void decode_sm90_kernel(const __grid_constant__ DecodeCall call, const __grid_constant__ CUtensorMap k_map,
                                   const __grid_constant__ CUtensorMap v_map);
template <class Shape>
__global__ void decode_lists_sm90_kernel(const __grid_constant__ DecodeCall call, const __grid_constant__ CUtensorMap k_map,
                                         const __grid_constant__ CUtensorMap v_map,
                                         const __grid_constant__ CUtensorMap k_granule_map,
                                         const __grid_constant__ CUtensorMap v_granule_map);

template <class Shape>
DecodeKernel make_decode_sm90_kernel() {
  using K = typename Shape::KRows;
  using V = typename Shape::VRows;
  const void* function;
  if constexpr (Shape::kHasLists)
    function = reinterpret_cast<const void*>(decode_lists_sm90_kernel<Shape>);
  else
    function = reinterpret_cast<const void*>(decode_sm90_kernel<Shape>);
  return describe_decode_kernel<Shape>(0, function, {K::kRowBytes, K::kWidth, K::kKeys},
                                       {V::kRowBytes, V::kWidth, V::kKeys});
}

}  // namespace tandem::cuda
