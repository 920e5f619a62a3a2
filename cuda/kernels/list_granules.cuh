// SPDX-License-Identifier: MIT
// Makes granules of key lists (lib/tables/key_list.h) from ascending units of tokens, for all kernels that write lists.
//
// An item is a granule of a unit or, if units are smaller than a granule, a unit. The first of a granule's units then
// writes the granule for all of them. A prefix sum over the block gives each granule its place.
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/decode_work.cuh"

namespace tandem::cuda {

// Units of 2^shift tokens, ascending. Pads of -1 come last.
struct NamedUnits {
  const int32_t* units = nullptr;
  int n = 0, shift = 0;

  __device__ int n_items() const { return n << max(shift - kGranuleShift, 0); }
  static constexpr int kGranuleShift = 3;
  static_assert(1 << kGranuleShift == kGranuleKeys);
};

// Returns the place after *n of the calling thread's item, if has_any, and adds the block's items to *n. All threads take
// part.
__device__ inline int place_in_block(bool has_any, int (&of_warps)[kNameWarps], int* n) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const unsigned in_warp = __ballot_sync(~0u, has_any);
  __syncthreads();
  if (lane == 0) of_warps[warp] = __popc(in_warp);
  __syncthreads();
  int before = *n, total = 0;
#pragma unroll
  for (int w = 0; w < kNameWarps; ++w) {
    if (w < warp) before += of_warps[w];
    total += of_warps[w];
  }
  *n += total;
  return before + __popc(in_warp & ((1u << lane) - 1));
}

// Returns the granule of an item, with its bits in [begin, end). Without bits if another item writes the granule.
__device__ inline KeyGranule find_granule(const NamedUnits& of, int item, int64_t begin, int64_t end) {
  const int shift = of.shift;
  if (shift >= NamedUnits::kGranuleShift) {
    const int in_unit = shift - NamedUnits::kGranuleShift, unit = of.units[item >> in_unit];
    const int64_t token = (int64_t{unit} << shift) + (item & ((1 << in_unit) - 1)) * kGranuleKeys;
    if (unit < 0 || token >= end) return {};
    return {static_cast<int32_t>(token), granule_bits(token, begin, end), 0};
  }
  const int to_granule = NamedUnits::kGranuleShift - shift, unit = of.units[item];
  if (unit < 0 || int64_t{unit} << shift >= end) return {};
  const int granule = unit >> to_granule;
  if (item > 0 && of.units[item - 1] >> to_granule == granule) return {};
  uint32_t bits = 0;
  for (int i = item; i < of.n && of.units[i] >> to_granule == granule; ++i)
    bits |= ((1u << (1 << shift)) - 1) << ((of.units[i] << shift) & (kGranuleKeys - 1));
  const int64_t token = int64_t{granule} * kGranuleKeys;
  return {static_cast<int32_t>(token), bits & granule_bits(token, begin, end), 0};
}

}  // namespace tandem::cuda
