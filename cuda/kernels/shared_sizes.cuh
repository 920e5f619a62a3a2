// SPDX-License-Identifier: MIT
// Kernels that need no compute capability 9.0 come in two sizes, by the shared memory of a multiprocessor that their tiles
// and pipelines are made for: 227 KiB as 9.0 and 10.0 have it, or 99 KiB, which every device from 8.0 on has.
#pragma once

namespace tandem::cuda {

inline constexpr int kLargeShared = 227 * 1024, kSmallShared = 99 * 1024;

#ifdef __CUDA_ARCH__
// Whether devices that run this code use kernels of that size. Code for 9.0 from its own instructions (90a) runs there
// alone; other code for 9.0 runs on newer devices too, of which some have 99 KiB.
template <int kOfMultiprocessor>
inline constexpr bool kIsForThisCode =
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    kOfMultiprocessor == kLargeShared;
#else
    __CUDA_ARCH__ >= 900 || kOfMultiprocessor == kSmallShared;
#endif
#endif

}  // namespace tandem::cuda
