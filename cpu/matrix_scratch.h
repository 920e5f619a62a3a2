// SPDX-License-Identifier: MIT
// The scratch memory of one worker of matrix_block.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/aligned_bytes.h"
#include "cpu/kernels/matrix_kernels.h"
#include "cpu/matmul_attend.h"
#include "cpu/matmul_keys.h"

namespace tandem::cpu {

struct MatrixScratch {
  static constexpr int32_t kRows = MatmulAttend::kTaskRows, kKeys = kMatrixKeys;
  static constexpr int32_t kMaxAheadBlocks = 4 * kKeys / kMatrixRows;

  Status allocate(int32_t k_head_dim, int32_t v_head_dim);

  uint16_t* q = nullptr;             // [kRows / 16][planes][k_head_dim / 32][16][16][2]
  uint16_t* q_rows = nullptr;        // [planes][16, k_head_dim]
  uint16_t* k = nullptr;             // [planes][kKeys, k_head_dim rounded up to whole steps]
  uint16_t* v = nullptr;             // [planes][kKeys, v_head_dim]
  uint16_t* v_tiles = nullptr;       // [planes][v_head_dim / 16][kKeys / 32][16][32]
  float* widened = nullptr;          // [kKeys, the larger head_dim]
  float* s = nullptr;                // [2][kKeys][16]
  uint16_t* p = nullptr;             // [2][planes][kKeys / 2][16][2]
  float* o = nullptr;                // [kRows / 16][v_head_dim][16]
  float* max = nullptr;              // [kRows]
  float* sum = nullptr;              // [kRows]
  float* angles = nullptr;           // [k_head_dim]
  float* value = nullptr;            // [v_head_dim]
  uint8_t* zeros = nullptr;          // a row of V, all zero
  uint16_t* visible = nullptr;       // [kKeys]
  uint32_t* columns = nullptr;       // [kKeys]
  int32_t* odd_columns = nullptr;    // [kKeys]
  const uint8_t** v_rows = nullptr;  // [kKeys]
  const uint8_t** ahead = nullptr;   // [kMaxAheadBlocks]
  KeySegment* segments[2] = {};      // [kKeys] each

 private:
  AlignedBytes data_;
};

}  // namespace tandem::cpu
