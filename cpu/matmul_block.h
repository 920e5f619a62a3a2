// SPDX-License-Identifier: MIT
// One block of query rows over all its keys, and what it works with. Used by matmul_attend.cc alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

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

struct Geometry {
  int32_t k_head_dim = 0, v_head_dim = 0;
  std::unique_ptr<TileProducts> f32;
  std::unique_ptr<TileProducts> bf16;  // null: not prepared, or not faster here
};

struct AlignedFree {
  void operator()(void* data) const;
};
using AlignedBytes = std::unique_ptr<std::byte, AlignedFree>;
Status allocate_aligned(size_t bytes, AlignedBytes* data);

// Memory of one worker.
struct Scratch {
  static constexpr int32_t kRows = MatmulAttend::kTaskRows, kKeys = MatmulAttend::kTileKv;

  Status allocate(int32_t k_head_dim, int32_t v_head_dim, size_t scratchpad_bytes);
  Status reserve_scratchpad(size_t bytes);

  std::byte* q = nullptr;          // [kRows, k_head_dim] f32 or bf16
  std::byte* k = nullptr;          // [kKeys, k_head_dim] f32 or bf16
  std::byte* v = nullptr;          // [kKeys, v_head_dim] f32 or bf16
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
  const AttendJob& job;
  const Geometry& geometry;
  const KernelTable& kernels;
  const SoftmaxTileKernels& tile_kernels;
  Scratch& scratch;
  int32_t worker_idx;
  int32_t row_begin;
  int32_t n_rows;  // <= kTaskRows
};
void attend_block(const BlockJob& block);

}  // namespace tandem::cpu
