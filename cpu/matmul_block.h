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
#include "lib/base/status.h"
#include "lib/tables/backend.h"

namespace tandem::cpu {

// Keys of a tile are multiplied in steps of so many.
inline constexpr int32_t kKeyStep = 128;
// Logits: a row is a line longer than 512 columns, so that rows do not fall on the same sets of the cache.
inline constexpr int64_t kStrideS = MatmulAttend::kTileKv + 16;

// Where V is the first columns of K's tile, no tile of its own.
inline bool values_in_keys(const Layer& layer) { return layer.v_aliases_k && layer.rope == nullptr; }
inline int32_t v_tile_stride(const Layer& layer) { return values_in_keys(layer) ? layer.k_head_dim : layer.v_head_dim; }

// Memory of one worker.
struct Scratch {
  static constexpr int32_t kRows = MatmulAttend::kTaskRows, kKeys = MatmulAttend::kTileKv;

  Status allocate(int32_t k_head_dim, int32_t v_head_dim);

  std::byte* q = nullptr;          // [kRows, k_head_dim] f32 or bf16
  std::byte* k = nullptr;          // [kKeys, k_head_dim] f32 or bf16
  std::byte* v = nullptr;          // [kKeys, the larger of both] f32 or bf16
  float* k_panels = nullptr;       // [kKeys / kPanelColumns, k_head_dim, kPanelColumns], or half of it as pairs of bf16
  uint32_t* v_pairs = nullptr;     // [kKeys / 2, v_head_dim]
  float* o = nullptr;              // [kRows, v_head_dim]
  float* s = nullptr;              // [kTileQ, kStrideS]
  float* row_max = nullptr;        // [kRows]
  float* row_sum = nullptr;        // [kRows]
  float* angles = nullptr;         // [k_head_dim]
  float* value = nullptr;          // [v_head_dim]
  uint32_t* visible = nullptr;     // [kKeys]
  int32_t* odd_columns = nullptr;  // [kKeys]
  KeySegment* segments = nullptr;  // [kKeys]

 private:
  AlignedBytes data_;
};

struct BlockJob {
  const Span& span;  // of at most kTaskRows rows
  const KernelTable& kernels;
  const SoftmaxTileKernels& tile_kernels;
  Scratch& scratch;
  bool bf16;  // where q, and keys or values, are exact in bf16, they are multiplied as that
};
void attend_block(const BlockJob& block);

}  // namespace tandem::cpu
