// SPDX-License-Identifier: MIT
// Attends one block of query rows over all its keys, and the scratch for that. Only matmul_attend.cc uses it.
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

// Keys of a tile are multiplied in steps of this many.
inline constexpr int32_t kKeyStep = 128;
// Floats between rows of logits: 512 columns and a cache line more, so that rows do not fall on the same cache sets.
inline constexpr int64_t kStrideS = MatmulAttend::kTileKv + 16;

// True if V is the first columns of K's tile and needs no tile of its own.
inline bool values_in_keys(const Layer& layer) { return layer.v_aliases_k && layer.rope == nullptr; }
inline int32_t v_tile_stride(const Layer& layer) { return values_in_keys(layer) ? layer.k_head_dim : layer.v_head_dim; }

// Memory of one worker.
struct Scratch {
  static constexpr int32_t kRows = MatmulAttend::kTaskRows, kKeys = MatmulAttend::kTileKv;

  Status allocate(int32_t k_head_dim, int32_t v_head_dim);

  std::byte* q = nullptr;  // [kRows, k_head_dim] f32 or bf16
  std::byte* k = nullptr;  // [kKeys, k_head_dim] f32 or bf16
  std::byte* v = nullptr;  // [kKeys, the larger head_dim] f32 or bf16
  // [kKeys / kPanelColumns, k_head_dim, kPanelColumns], or half as many words as pairs of bf16
  float* k_panels = nullptr;
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
  bool bf16;  // true: operands that are exact in bf16 (q, and keys or values) are multiplied as bf16
};
void attend_block(const BlockJob& block);

}  // namespace tandem::cpu
