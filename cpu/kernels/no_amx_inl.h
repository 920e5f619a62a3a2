// SPDX-License-Identifier: MIT
// The functions of cpu/kernels/amx_inl.h for targets without a matrix unit. No layer takes tiles.
#pragma once

#include "cpu/kernels/tile_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

inline constexpr int64_t kTarget = HWY_TARGET;
inline constexpr const MatrixKernels* kMatrix = nullptr;

constexpr bool takes_tiles(const Layer&) { return false; }
HWY_INLINE void open_tiles() {}
HWY_INLINE void close_tiles() {}
HWY_INLINE void pack_tiles(const Layer&, const float*, int64_t, SpanScratch&) {}
HWY_INLINE void dots_by_tiles(const Layer&, int64_t, const KeyList&, SpanScratch&) {}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
