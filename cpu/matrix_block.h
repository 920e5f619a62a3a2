// SPDX-License-Identifier: MIT
// Attends blocks of query rows over all their keys on a matrix unit, as matmul_block.h does with vector instructions. Only
// matmul_attend.cc uses it.
//
// Why not oneDNN: it wants B packed, leaves C by rows, and packs B anew for every tile of rows (two thirds of its time
// here). Here K is never packed, q is packed once, and V once for all rows of a block (matrix_kernels.h).
//
// Planes: bf16 and e4m3 have 1, f16 has 2, all other types have 3. q has 1 if it is exact in bf16. p has 1 (rounded) if q
// has 1 and V is bf16, as in matmul_attend.h; otherwise p has 3.
#pragma once

#include <memory>

#include "cpu/kernels/softmax_tile.h"
#include "cpu/matmul_attend.h"

namespace tandem::cpu {

// kernels.matrix must not be null. tile_kernels does caps, rotation and non-finite values.
std::unique_ptr<MatmulAttend> make_matrix_attend(const KernelTable& kernels, const SoftmaxTileKernels& tile_kernels);

}  // namespace tandem::cpu
