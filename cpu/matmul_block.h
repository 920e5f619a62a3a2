// SPDX-License-Identifier: MIT
// One block of query rows over all its keys, and what it works with. Used by matmul_attend.cc alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cpu/aligned_bytes.h"
#include "cpu/kernels/softmax_tile.h"
#include "cpu/matmul_attend.h"
#include "cpu/matmul_keys.h"
#include "cpu/onednn.h"
#include "lib/backend.h"
#include "lib/status.h"

namespace tandem::cpu {

// Shapes there are primitives for. A tile of fewer rows is padded to the next size; fewer keys are done in steps of 128.
inline constexpr int32_t kSizesM = 3, kSizesN = 2;
inline constexpr int32_t kTileRows[kSizesM] = {32, 64, MatmulAttend::kTileQ};
inline constexpr int32_t kTileColumns[kSizesN] = {128, MatmulAttend::kTileKv};
// Logits: a row is a line longer than 512 columns, so that rows do not fall on the same sets of the cache.
inline constexpr int64_t kStrideS = MatmulAttend::kTileKv + 16;

struct TileProducts {
  Matmul qk[kSizesM][kSizesN];
  Matmul pv[kSizesM][kSizesN];
};

// Where V is the first columns of K's tile, no tile of its own.
inline bool values_in_keys(const Layer& layer) { return layer.v_aliases_k && layer.rope == nullptr; }
inline int32_t v_tile_stride(const Layer& layer) { return values_in_keys(layer) ? layer.k_head_dim : layer.v_head_dim; }

struct Geometry {
  int32_t k_head_dim = 0, v_head_dim = 0, v_stride = 0;
  std::unique_ptr<TileProducts> f32;
  std::unique_ptr<TileProducts> bf16;  // null: not prepared, or not faster here
};

// Memory of one worker.
struct Scratch {
  static constexpr int32_t kRows = MatmulAttend::kTaskRows, kKeys = MatmulAttend::kTileKv;

  Status allocate(int32_t k_head_dim, int32_t v_head_dim, size_t scratchpad_bytes);
  Status reserve_scratchpad(size_t bytes);

  std::byte* q = nullptr;          // [kRows, k_head_dim] f32 or bf16
  std::byte* k = nullptr;          // [kKeys, k_head_dim] f32 or bf16
  std::byte* v = nullptr;          // [kKeys, the larger of both] f32 or bf16
  float* o = nullptr;              // [kRows, v_head_dim]
  float* s = nullptr;              // [kTileQ, kStrideS]
  float* row_max = nullptr;        // [kRows]
  float* row_sum = nullptr;        // [kRows]
  float* angles = nullptr;         // [k_head_dim]
  float* value = nullptr;          // [v_head_dim]
  uint32_t* visible = nullptr;     // [kKeys]
  int32_t* odd_columns = nullptr;  // [kKeys]
  KeySegment* segments = nullptr;  // [kKeys]
  std::byte* scratchpad = nullptr;

 private:
  AlignedBytes data_, scratchpad_data_;
  size_t scratchpad_bytes_ = 0;
};

struct BlockJob {
  const Span& span;  // of at most kTaskRows rows
  const Geometry& geometry;
  const KernelTable& kernels;
  const SoftmaxTileKernels& tile_kernels;
  Scratch& scratch;
  int32_t worker_idx;
};
void attend_block(const BlockJob& block);

}  // namespace tandem::cpu
