// SPDX-License-Identifier: MIT
// The work of Intel AMX: blocks of many query rows (amx_block_inl.h), and for few rows the logits of bf16, q8_0 and q4_0
// keys. The caller opens the tiles before and closes them after.
//
// Weighted sums of V were tried and are not faster. The unit sums over neighbours, which are dims in V. So either keys must
// first be brought side by side (q8_0, q4_0), or half of the multiplications are with 0. The latter for bf16, 4 rows of 128
// dims: 8 ns a key against 9.5 by vectors, but 12 against 10.5 with the next V prefetched. For q8_0 and q4_0 the weights,
// times scales, were four signed bytes in 16 rows of A. Decode of both from a core's own cache took 8 and 16 % less time,
// but 16 threads that read from memory took 8 and 12 % more. Small weights matter where large ones meet codes of 0. So rows
// whose weights span more than some 2^13 would have to use the vectors all the same.
#pragma once

#include "cpu/kernels/amx_block_inl.h"
#include "cpu/kernels/amx_codes_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

// True if the unit computes the layer's logits. Head dims of 80 and 112 are no whole tiles. Beyond 128 B does not fit into
// the tiles beside A and C.
HWY_INLINE bool takes_tiles(const Layer& layer) {
  const int64_t dim = layer.k_head_dim;
  if (layer.rope != nullptr || dim > kMaxTileDim) return false;
  if (layer.k_type == TANDEM_BF16) return dim % kTileDims == 0;
  const bool is_coded = layer.k_type == TANDEM_Q8_0 || layer.k_type == TANDEM_Q4_0;
  return (is_coded || stored_dtype(layer.k_type).in_blocks) && dim % 64 == 0;
}

// Calls use(Codes()) with the storage type's codes.
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

// Packs q [n_rows, head_dim] times sm_scale in the layout of dots_by_tiles().
inline void pack_tiles(const Layer& layer, const float* q, int64_t n_rows, SpanScratch& s) {
  const int64_t dim = layer.k_head_dim;
  if (layer.k_type == TANDEM_BF16) return pack_bf16(q, n_rows, dim, layer.sm_scale, s.tiles);
  with_codes(layer.k_type, [&](auto codes) HWY_ATTR {
    pack_codes<decltype(codes)>(q, n_rows, dim, layer.sm_scale, s.tiles, s.tile_scales);
  });
}

// As dots_of(), with the rows of q that were packed last. Overwrites up to 15 logits past the last key.
inline void dots_by_tiles(const Layer& layer, int64_t n_rows, const KeyList& keys, SpanScratch& s) {
  const int64_t dim = layer.k_head_dim;
  if (layer.k_type == TANDEM_BF16) return dots_of_bf16(s.tiles, n_rows, dim, keys, s.logits);
  with_codes(layer.k_type, [&](auto codes) HWY_ATTR { dots_of_codes<decltype(codes)>(s, n_rows, dim, keys, s.logits); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
