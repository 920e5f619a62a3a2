// SPDX-License-Identifier: MIT
#include "cpu/tile_rows.h"

#include <algorithm>

#include "lib/model/dtype.h"
#include "lib/model/rope.h"

namespace tandem::cpu {

TileSource key_source(const Layer& layer) {
  return {false, layer.k_type, layer.k_head_dim, k_stride_of(layer), scale_bytes(layer.k_type, layer.k_head_dim)};
}

TileSource value_source(const Layer& layer) {
  const int32_t stored_dim = layer.v_aliases_k ? layer.k_head_dim : layer.v_head_dim;
  return {true, layer.v_type, layer.v_head_dim, v_stride_of(layer), scale_bytes(layer.v_type, stored_dim)};
}

const std::byte* stored_row(const TileSource& source, const KeySegment& segment, int32_t column) {
  const void* stored = source.is_value ? segment.run->v : segment.run->k;
  return static_cast<const std::byte*>(stored) + (segment.row + column - segment.column) * source.stride;
}

void widen_row(const KernelTable& kernels, const TileSource& source, const KeySegment& segment, int32_t column, int64_t n,
               float* to) {
  const void* scales = source.is_value ? segment.run->v_scales : segment.run->k_scales;
  if (source.scale_bytes > 0)
    scales = static_cast<const std::byte*>(scales) + (segment.row + column - segment.column) * source.scale_bytes;
  kernels.to_f32(source.dtype, stored_row(source, segment, column), source.scale_bytes > 0 ? scales : nullptr, to, n);
}

void widen_tile(const KernelTable& kernels, const TileSource& source, const KeyTile& tile, float* to) {
  const bool compact = source.side_by_side() && n_scales(source.dtype, source.head_dim) == 0;
  for (int32_t i = 0; i < tile.n_segments; ++i) {
    const KeySegment& segment = tile.segments[i];
    const int32_t step = compact ? segment.n_keys : 1;
    for (int32_t key = 0; key < segment.n_keys; key += step) {
      const int32_t column = segment.column + key;
      widen_row(kernels, source, segment, column, int64_t{step} * source.head_dim, to + int64_t{column} * source.head_dim);
    }
  }
}

// Consecutive positions share all but the lowest base-256 digit, so a segment is rotated in stretches of up to 256 keys.
void rotate_tile(const SoftmaxTileKernels& kernels, const Layer& layer, const KeyTile& tile, float* rows, float* angles) {
  const RopeTable& rope = *layer.rope;
  RotateRows job;
  job.stride = layer.k_head_dim;
  job.high = angles;
  job.n_pairs = rope.n_pairs;
  job.interleaved = rope.interleaved;
  int64_t high = -1;
  for (int32_t i = 0; i < tile.n_segments; ++i) {
    const KeySegment& segment = tile.segments[i];
    const KvRun& run = *segment.run;
    for (int32_t j = 0; j < segment.n_keys; j += static_cast<int32_t>(job.n_rows)) {
      const int64_t row = segment.row + j;
      const int64_t position = run.positions != nullptr ? run.positions[row] : run.first_position + row;
      if (high != position >> 8) {
        high = position >> 8;
        rope_angles(rope, high << 8, angles);
        for (int32_t pair = 0; pair < 2 * rope.n_pairs; ++pair) angles[pair] *= rope.attn_factor;
      }
      job.rows = rows + (segment.column + j) * job.stride;
      job.low = rope.row(0, static_cast<int32_t>(position & 255));
      job.n_rows = run.positions != nullptr ? 1 : std::min<int64_t>(segment.n_keys - j, 256 - (position & 255));
      kernels.rotate(job);
    }
  }
}

}  // namespace tandem::cpu
