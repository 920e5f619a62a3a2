// SPDX-License-Identifier: MIT
// Granules of key lists (lib/tables/key_list.h) from units of tokens that ascend: what blocks that write lists share.
//
// An item is a granule of a unit or, of units that are smaller than a granule, a unit: the first of a granule's units writes
// it for all of them. A prefix sum over the block says where.
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/decode_work.cuh"

namespace tandem::cuda {

// Units of 2^shift tokens, ascending; pads of -1 are the last.
struct NamedUnits {
  const int32_t* units = nullptr;
  int n = 0, shift = 0;

  __device__ int n_items() const { return n << max(shift - kGranuleShift, 0); }
  static constexpr int kGranuleShift = 3;
  static_assert(1 << kGranuleShift == kGranuleKeys);
};

// Where the block's threads that have something to write put it, behind *n. All threads take part.
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

// The granule of an item, its bits in [begin, end); no bits where another item writes it.
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
