// SPDX-License-Identifier: MIT
// What Intel AMX computes: blocks of many query rows (amx_block_inl.h), and for few rows the logits of bf16, q8_0 and q4_0
// keys. Who calls opens the tiles before and closes them after.
//
// Weighted sums of V were tried and are not faster. The unit sums over neighbours, which in V are dims: either keys are
// brought side by side first (q8_0, q4_0), or half of the multiplications are with 0 (bf16: 8 ns a key for 4 rows of 128
// dims, 9.5 by vectors, but with the next V prefetched 12 against 10.5). For q8_0 and q4_0 the weights, times scales, were
// four signed bytes in 16 rows of A: decode of both from a core's own cache took 8 and 16 % less time, but 16 threads
// reading from memory took 8 and 12 % more. Small weights count where large ones meet codes of 0, so that rows whose
// weights span more than some 2^13 have to go to the vectors all the same.
#pragma once

#include "cpu/kernels/amx_block_inl.h"
#include "cpu/kernels/amx_codes_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

// 80 and 112 are no whole tiles, and beyond 128 B does not fit into the tiles beside A and C.
HWY_INLINE bool takes_tiles(const Layer& layer) {
  const int64_t dim = layer.k_head_dim;
  if (layer.rope != nullptr || dim > kMaxTileDim) return false;
  if (layer.k_type == TANDEM_BF16) return dim % kTileDims == 0;
  const bool is_coded = layer.k_type == TANDEM_Q8_0 || layer.k_type == TANDEM_Q4_0;
  return (is_coded || stored_dtype(layer.k_type).in_blocks) && dim % 64 == 0;
}

// use(Codes()) for a type of codes.
template <class Use>
HWY_INLINE void with_codes(int32_t dtype, const Use& use) {
  switch (dtype) {
    case TANDEM_Q8_0:
      return use(CodesQ8());
    case TANDEM_Q4_0:
      return use(CodesQ4());
    case kQ8_0Blocks:
      return use(CodesQ8Blocks());
    case kQ4_0Blocks:
      return use(CodesQ4Blocks());
  }
}

// q [n_rows, head_dim] times sm_scale, as dots_by_tiles() reads it.
inline void pack_tiles(const Layer& layer, const float* q, int64_t n_rows, SpanScratch& s) {
  const int64_t dim = layer.k_head_dim;
  if (layer.k_type == TANDEM_BF16) return pack_bf16(q, n_rows, dim, layer.sm_scale, s.tiles);
  with_codes(layer.k_type, [&](auto codes) HWY_ATTR {
    pack_codes<decltype(codes)>(q, n_rows, dim, layer.sm_scale, s.tiles, s.tile_scales);
  });
}

// As dots_of(), with the q packed last. Up to 15 logits past the last key are overwritten.
inline void dots_by_tiles(const Layer& layer, int64_t n_rows, const KeyList& keys, SpanScratch& s) {
  const int64_t dim = layer.k_head_dim;
  if (layer.k_type == TANDEM_BF16) return dots_of_bf16(s.tiles, n_rows, dim, keys, s.logits);
  with_codes(layer.k_type, [&](auto codes) HWY_ATTR { dots_of_codes<decltype(codes)>(s, n_rows, dim, keys, s.logits); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
