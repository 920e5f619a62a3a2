// SPDX-License-Identifier: MIT
// Kernels that need no compute capability 9.0 come in two sizes. Their tiles and pipelines are made for a multiprocessor
// with 227 KiB of shared memory, as 9.0 and 10.0 have, or with 99 KiB, which every device from 8.0 on has.
#pragma once

namespace tandem::cuda {

inline constexpr int kLargeShared = 227 * 1024, kSmallShared = 99 * 1024;

#ifdef __CUDA_ARCH__
// True if devices that run this code use kernels of that size. Code from 9.0's own instructions (90a) runs on 9.0 alone.
// Other code for 9.0 also runs on newer devices, of which some have 99 KiB.
template <int kOfMultiprocessor>
inline constexpr bool kIsForThisCode =
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    kOfMultiprocessor == kLargeShared;
#else
    __CUDA_ARCH__ >= 900 || kOfMultiprocessor == kSmallShared;
#endif
#endif

}  // namespace tandem::cuda
