// SPDX-License-Identifier: MIT
// Kernels of a search for blocks of many queries, for compute capability 9.0.
#include "cuda/kernels/wide_judges.cuh"

namespace tandem::cuda {

extern const WideKernels kWideKernels[];
const WideKernels kWideKernels[] = {
#define TANDEM_WIDE(n_heads)                                                                                            \
  {n_heads, wide_search_kernel<WideBounds<n_heads>>, wide_search_kernel<WideExact<n_heads>>, wide_sums_kernel<n_heads>, \
   wide_search_kernel<WideDescent<n_heads>>},
    TANDEM_WIDE(4) TANDEM_WIDE(2) TANDEM_WIDE(1)
#undef TANDEM_WIDE
        {}};

}  // namespace tandem::cuda
