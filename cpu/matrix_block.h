// SPDX-License-Identifier: MIT
// Blocks of query rows over all their keys on a matrix unit: what matmul_block.h is with vector instructions. Used by
// matmul_attend.cc alone.
//
// Why not oneDNN: its products want B packed and leave C by rows, and it packs what it is given anew for every tile of rows
// (two thirds of its time here). Here K is never packed, q once, V once for all rows of a block (matrix_kernels.h).
//
// Planes: bf16 and e4m3 have 1, f16 2, all others 3; q has 1 where it is exact in bf16. p has 1, rounded, where q has
// and V is bf16, as in matmul_attend.h; otherwise 3.
#pragma once

#include <memory>

#include "cpu/kernels/softmax_tile.h"
#include "cpu/matmul_attend.h"

namespace tandem::cpu {

// kernels.matrix is there. tile_kernels: for caps, rotation and what is not finite.
std::unique_ptr<MatmulAttend> make_matrix_attend(const KernelTable& kernels, const SoftmaxTileKernels& tile_kernels);

}  // namespace tandem::cpu
