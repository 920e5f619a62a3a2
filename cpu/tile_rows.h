// SPDX-License-Identifier: MIT
// Finds the stored rows of a tile of keys and widens them to f32. Used by the blocks of matrix products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/softmax_tile.h"
#include "cpu/matmul_keys.h"
#include "lib/model/dtype.h"
#include "lib/tables/backend.h"

namespace tandem::cpu {

// K or V of a layer.
struct TileSource {
  bool is_value = false;
  int32_t dtype = 0;
  int32_t head_dim = 0;
  int64_t stride = 0;       // bytes between stored rows
  int64_t scale_bytes = 0;  // between the scales of stored rows; 0: no scales outside the rows
  int64_t row_bytes() const { return tandem::row_bytes(dtype, head_dim); }
  bool side_by_side() const { return stride == row_bytes(); }
};
TileSource key_source(const Layer& layer);
TileSource value_source(const Layer& layer);

// Returns the stored row of a column that the segment has.
const std::byte* stored_row(const TileSource& source, const KeySegment& segment, int32_t column);

// Converts n elements, starting at a column's row. May span several rows only if they lie side by side and have no scales.
void widen_row(const KernelTable& kernels, const TileSource& source, const KeySegment& segment, int32_t column, int64_t n,
               float* to);
// Converts all rows of the tile, head_dim floats each.
void widen_tile(const KernelTable& kernels, const TileSource& source, const KeyTile& tile, float* to);

// Library RoPE: rotates the keys of the tile, [n_keys, k_head_dim] f32, in place. `angles` has room for k_head_dim floats.
void rotate_tile(const SoftmaxTileKernels& kernels, const Layer& layer, const KeyTile& tile, float* rows, float* angles);

}  // namespace tandem::cpu
