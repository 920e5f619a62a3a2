// SPDX-License-Identifier: MIT
// Converts blocks of quantised elements, as tensors of the ABI hold them, to and from Tandem's codes and scales. A block is
// a group's scales, then its codes.
//
//   q8_0    34 bytes for 32 elements   f16 scale d | 32 int8 codes c                 element = d c         as ggml has them
//   q4_0    18 bytes for 32 elements   f16 scale d | 16 bytes of two codes           element = d (c - 8)   as ggml has them
//                                      byte j: element j below, element j + 16 above
//   q4_64   36 bytes for 64 elements   f16 d | f16 minimum m | 32 bytes of two codes   element = d c + m
//                                      byte j: element 2 j below, element 2 j + 1 above
//
// In the store, codes of a row lie side by side and its scales elsewhere. In stored q4_0, too, byte j holds elements 2 j
// (below) and 2 j + 1. So byte vectors of any length split into even and odd elements, and rows may end within a group.
#pragma once

#include <cstdint>

namespace tandem {

// Elements and bytes of one block; 0 if the type has no blocks.
int64_t block_elements(int32_t dtype);
int64_t block_bytes(int32_t dtype);
// n: a multiple of block_elements().
void split_blocks(int32_t dtype, const void* blocks, int64_t n, void* codes, void* scales);
void join_blocks(int32_t dtype, const void* codes, const void* scales, int64_t n, void* blocks);

}  // namespace tandem
